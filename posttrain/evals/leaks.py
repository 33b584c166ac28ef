"""Leaks: solutions and hidden tests that a policy could read.

Exact lines of what must stay private are looked for in what the policy reads and, from inside, in
the workspace it begins in. The one thing that must stay true: what a task has to show (its own
numbers, a file to be copied) is no leak; programs that judge and commands that solve are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from posttrain.core.containment import Sandboxes
from posttrain.core.errors import SandboxError
from posttrain.core.task import Json, Oracle, Task

LEAST_SECRET_CHARS = 16
"""Shorter texts occur by coincidence."""
SECRETS = ("source", "checker", "reference", "generator", "suite", "cases", "files")
"""Parameters of checks that a policy must not find."""
Search = Callable[[Task, Sequence[str]], Awaitable[Sequence[str]]]
"""Those of some lines of text that a task's workspace holds in a file, before the attempt."""


async def of(task: Task, oracle: Oracle, search: Search) -> list[str]:
    """What a policy can read and must not, as a sentence."""
    secrets, shown = _secrets(task, oracle), task.description
    told = [tool.description for tool in shown.tools]
    read = "\n".join([shown.objective, *shown.constraints, shown.verification, task.prefix, *told])
    found = [text for text in secrets if text in read]
    if not found and secrets and task.environment is not None:
        found += await search(task, secrets)
    return [f"{task.id} shows the policy what it must not see: {t!r:.60}" for t in found[:1]]


def _secrets(task: Task, oracle: Oracle) -> list[str]:
    """The most telling line of each text that a policy must not find."""
    texts: list[Json] = [
        check.params[k] for check in task.checks for k in SECRETS if k in check.params
    ]
    calls = [call.arguments or {} for turn in oracle.turns for call in turn.tool_calls]
    texts += [call[key] for call in calls for key in ("command", "code") if key in call]
    lines = (max(text.splitlines(), key=len, default="").strip() for text in _texts(texts))
    return list(dict.fromkeys(line for line in lines if len(line) >= LEAST_SECRET_CHARS))


def _texts(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


_FIND = """
import os, sys
lines = [line for line in sys.stdin.buffer.read().splitlines() if line]
for folder, _, names in os.walk("."):
    for name in names:
        place = os.path.join(folder, name)
        if not os.path.islink(place) and os.path.isfile(place):
            with open(place, "rb") as file:
                text = file.read()
            for line in lines:
                if line in text:
                    sys.stdout.buffer.write(line + b"\\n")
"""


def searcher(sandboxes: Sandboxes) -> Search:
    """Looks through a task's workspace as an attempt would find it, from inside."""

    async def search(task: Task, lines: Sequence[str]) -> Sequence[str]:
        assert task.environment is not None, "there is a workspace"
        async with sandboxes.lease(task.environment) as sandbox:
            found = await sandbox.exec(
                ("python3", "-I", "-S", "-B", "-c", _FIND), stdin="\n".join(lines).encode()
            )
            if found.exit_code != 0:
                raise SandboxError(f"the search for leaks failed: {found.stderr[-300:]}")
        return [line for line in lines if line in found.stdout.splitlines()]

    return search
