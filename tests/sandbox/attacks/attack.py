"""Attacks as data: what each tries, what holds it, and where the same thing succeeds.

An attack is counted once for what it does, whatever its variants. The one thing that must stay
true: an attack that does not succeed where nothing protects proves nothing where something does.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.core.task import Environment
from tests.sandbox.attacks.probe import Held

__all__ = ["SAME", "Attack", "Family", "Held", "program"]

SAME = "the same"
Attempt = Callable[[Any], Awaitable[object]]
Probe = Callable[[dict[str, Any]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One way to do harm."""

    family: str
    name: str
    primitive: str
    """What is tried."""
    boundary: str
    """What holds it."""
    control: str
    """What succeeds where nothing protects."""
    inside: Attempt
    """Given a sandbox's place: raises `Held`, or returns where it got through."""
    outside: Attempt
    """The same for a place that nothing protects."""
    environment: Environment
    root: bool
    """Whether the control needs root."""
    tree: bool
    """Whether only limits of a whole tree hold it."""
    optional: str
    """What a machine may lack, so that the control fails."""

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True)
class Family:
    """The attacks of one file."""

    name: str
    attacks: list[Attack] = field(default_factory=list)

    def attack(
        self,
        primitive: str,
        *,
        held_by: str,
        control: str = SAME,
        outside: Callable[..., Any] | None = None,
        environment: Environment | None = None,
        root: bool = False,
        tree: bool = False,
        optional: str = "",
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A coroutine function is given the place; any other function is a program that runs there
        by itself and is given the facts of the host. So for `outside`, which is the control where
        the same thing cannot be done without harm.
        """

        def enter(function: Callable[..., Any]) -> Callable[..., Any]:
            self.attacks.append(
                Attack(
                    family=self.name, name=function.__name__, primitive=primitive,
                    boundary=held_by, control=control, inside=_attempt(function),
                    outside=_attempt(outside or function),
                    environment=environment or Environment(), root=root, tree=tree,
                    optional=optional,
                )
            )  # fmt: skip
            return function

        return enter


def _attempt(function: Callable[..., Any]) -> Attempt:
    if inspect.iscoroutinefunction(function):
        return function

    async def attempt(place: Any) -> None:
        await place.run(function)

    return attempt


def program(function: Probe) -> str:
    """The text of a program that runs a probe."""
    source = textwrap.dedent(inspect.getsource(function))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef), "a probe is a plain function"
    node.decorator_list = []
    return f"{_BEGIN}\n{ast.unparse(node)}\nmain({function.__name__})\n"


_BEGIN = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
