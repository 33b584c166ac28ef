"""Static task sets: the unified description as authors write it, in TOML or JSON.

    name = "office.sums"

    [[tasks]]
    objective = "What is 17 + 25?"
    constraints = ["Reply with only the final answer."]
    verification = "The number is compared."
    prefix = "Answer:"
    checks = [{ kind = "numeric", params = { answer = "42" } }]
    oracle = { answer = "42" }

A task for a sandbox has `executor = "tools"`, `tools = ["shell"]` (or `shell_session`,
`python_session`), an `environment`, `artefacts` and `oracle = { commands = ["…"] }`. It reaches no
network unless its environment lists hosts with their ports, `network = { allow =
["a.example.org:443", "*.example.org:80"] }`, or opens it to every public one, `network = { open =
true }`. The reader opens no file. The one thing that must stay true: an unknown key is refused with
the nearest right one, never ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from posttrain.core import codec
from posttrain.core.errors import ConfigError, nearest
from posttrain.core.task import (
    Artefact,
    Check,
    Description,
    Environment,
    Json,
    Limits,
    Network,
    Oracle,
    OracleTurn,
    Task,
    Tool,
)
from posttrain.domains.domain import command_oracle, in_levels, tool_named

T = TypeVar("T")
_DESCRIPTION = ("objective", "constraints", "verification", "tools")
_TASK_KEYS = (
    *_DESCRIPTION,
    "level",
    "executor",
    "prefix",
    "checks",
    "artefacts",
    "environment",
    "limits",
    "private",
    "oracle",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One task of a set with its reference solution."""

    task: Task
    oracle: Oracle


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """A finite domain (`epochs.Finite`): a run goes through its tasks once an epoch."""

    name: str
    items: tuple[Item, ...]

    @property
    def levels(self) -> int:
        """One more than the highest level of a task."""
        return 1 + max(item.task.level for item in self.items)

    def all_tasks(self, level: int) -> list[Task]:
        """The tasks of a level in the order they are written; their seeds number them."""
        written = enumerate(self._written(level))
        return [dataclasses.replace(item.task, seed=number) for number, item in written]

    def task(self, seed: int, level: int) -> Task:
        """The task number `seed`, modulo their number, of a level."""
        return dataclasses.replace(self._item(seed, level).task, seed=seed)

    def oracle(self, task: Task) -> Oracle:
        """The written reference solution, whatever limits a run has set to the task."""
        item = self._item(task.seed, task.level)
        if (task.domain, task.description) != (self.name, item.task.description):
            raise ConfigError(f"{task.id} is no task of the set {self.name!r}.")
        return item.oracle

    def _item(self, seed: int, level: int) -> Item:
        written = self._written(level)
        return written[seed % len(written)]

    def _written(self, level: int) -> list[Item]:
        in_levels(self, level)
        return [item for item in self.items if item.task.level == level]


def read(tree: Json, *, where: str) -> TaskSet:
    """The task set of a parsed TOML or JSON file; `where` names it in errors.

    Raises:
        ConfigError: unknown or missing keys, wrong kinds of values, a level without tasks.
    """
    _known(tree, ("name", "tasks"), where)
    name, listed = tree.get("name"), tree.get("tasks")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: wanted a text as 'name', got {name!r:.80}.")
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{where}: wanted at least one task under 'tasks', got {listed!r:.80}.")
    items = tuple(
        task_from_toml(one, domain=name, where=f"{where}, task {number}")
        for number, one in enumerate(listed, 1)
    )
    levels = {item.task.level for item in items}
    missing = sorted(set(range(max(levels) + 1)) - levels)
    if missing:
        raise ConfigError(
            f"{where}: level {missing[0]} has no task; levels run from 0 without gap."
        )
    return TaskSet(name=name, items=items)


def task_from_toml(tree: Json, *, domain: str, where: str) -> Item:
    """One task as an author writes it. Its seed is 0.

    Raises:
        ConfigError: as `read`.
    """
    _known(tree, _TASK_KEYS, where)
    for key in ("objective", "checks", "oracle"):
        if not tree.get(key):
            raise ConfigError(f"{where}: wanted {key!r}; a task needs one.")
    described = {key: tree[key] for key in _DESCRIPTION if key in tree}
    described["tools"] = [_tool(one, where) for one in tree.get("tools", ())]
    _record(Description, described, where)
    fields = {key: tree[key] for key in ("level", "executor", "prefix", "private") if key in tree}
    value = {
        "domain": domain,
        "seed": 0,
        "level": 0,
        **fields,
        "description": described,
        "checks": _records(Check, tree["checks"], f"{where}, checks"),
        "artefacts": _records(Artefact, tree.get("artefacts", []), f"{where}, artefacts"),
    }
    if "environment" in tree:
        environment = _environment(tree["environment"], f"{where}, environment")
        value["environment"] = codec.to_json(environment)
    if "limits" in tree:
        value["limits"] = codec.to_json(_record(Limits, tree["limits"], f"{where}, limits"))
    task = _record(Task, value, where)
    if task.level < 0:
        raise ConfigError(f"{where}: wanted a level of 0 or more, got {task.level}.")
    return Item(task=task, oracle=_oracle(tree["oracle"], f"{where}, oracle"))


def _environment(value: Json, where: str) -> Environment:
    if isinstance(value, Mapping) and "network" in value:
        _record(Network, value["network"], f"{where}, network")
    return _record(Environment, value, where)


def _tool(value: Json, where: str) -> Json:
    if isinstance(value, str):
        return codec.to_json(tool_named(value))
    return codec.to_json(_record(Tool, value, f"{where}, tools"))


def _oracle(tree: Json, where: str) -> Oracle:
    """`{answer = "…"}`, `{commands = ["…"], closing = "…"}`, or `{turns = […]}` in full."""
    _known(tree, ("answer", "commands", "closing", "turns"), where)
    if len({"answer", "commands", "turns"} & set(tree)) != 1:
        raise ConfigError(f"{where}: wanted exactly one of 'answer', 'commands' and 'turns'.")
    if "turns" in tree:
        return _record(Oracle, {"turns": tree["turns"]}, where)
    if "commands" in tree:
        commands = [str(one) for one in tree["commands"]]
        return command_oracle(commands, closing=str(tree.get("closing", "Done.")))
    return Oracle(turns=(OracleTurn(text=str(tree["answer"])),))


def _records(kind: type[Any], values: Json, where: str) -> list[Json]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ConfigError(f"{where}: wanted a list, got {values!r:.80}.")
    return [codec.to_json(_record(kind, value, where)) for value in values]


def _record(kind: type[T], value: Json, where: str) -> T:
    _known(value, [field.name for field in dataclasses.fields(kind)], where)  # type: ignore[arg-type]
    try:
        return codec.from_json(kind, value)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _known(value: Json, known: Sequence[str], where: str) -> None:
    """Refuse what is no table, and keys that mean nothing here."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: wanted a table, got {value!r:.80}.")
    for key in value:
        if key not in known:
            hint = nearest(str(key), known) or f"; known: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}{hint}.")
