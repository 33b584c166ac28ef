"""The terminal family: shell tasks in a sandbox, judged by the files they leave.

Eleven kinds, three levels each; level 0 is one short command. It runs nothing and judges nothing:
a task names its files, and its checks name what must be true of them. The one thing that must stay
true: no two kinds share a template, and the hidden assertions never enter the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.core import seeds
from posttrain.core.errors import UsageError
from posttrain.core.ports import Domain
from posttrain.core.task import Environment, Json, Oracle, Task
from posttrain.domains import domain as build
from posttrain.domains.families import terminal_data, terminal_files
from posttrain.domains.families.terminal_scene import Make

KINDS: Mapping[str, Make] = {
    "edit": terminal_files.edit,
    "move": terminal_files.move,
    "cleanup": terminal_files.cleanup,
    "permissions": terminal_files.permissions,
    "archive": terminal_files.archive,
    "checksum": terminal_files.checksum,
    "logs": terminal_data.logs,
    "pipeline": terminal_data.pipeline,
    "tables": terminal_data.tables,
    "records": terminal_data.records,
    "sqlite": terminal_data.database,
}
LEVELS: Mapping[str, int] = dict.fromkeys(KINDS, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """One kind of terminal task as a domain."""

    name: str
    make: Make
    levels: int = 3

    def task(self, seed: int, level: int) -> Task:
        """The scene of a seed at a level, as a task."""
        build.in_levels(self, level)
        scene = self.make(seeds.stream(self.name, level, seed), level)
        return build.shell_task(
            scene.objective,
            domain=self.name,
            seed=seed,
            level=level,
            environment=Environment(files=dict(scene.files), setup=scene.setup),
            checks=scene.checks,
            artefacts=scene.artefacts,
            commands=scene.commands,
            constraints=scene.constraints,
        )

    def oracle(self, task: Task) -> Oracle:
        """The scene's commands, one a turn."""
        return build.shell_oracle(task)


def domain(kind: str, *, name: str, params: Json = None) -> Domain:
    """The domain of a kind. Terminal kinds take no parameters of their own.

    Raises:
        UsageError: parameters were given.
    """
    if params:
        raise UsageError(f"domain 'terminal.{kind}' takes no params, got {params!r:.80}.")
    return Terminal(name=name, make=KINDS[kind])
