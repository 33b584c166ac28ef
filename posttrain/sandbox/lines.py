"""What a pool knows of one environment: its demand, who waits for it, and what there is of it.

Pure records; what is done with them is `pool`'s. The one thing that must stay true: a sandbox is in
the line of its environment under the state it has.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.sandbox.demand import Demand
from posttrain.sandbox.moves import State


def by_state() -> dict[State, dict[int, Slot]]:
    """No sandboxes yet, by state and number; the one longest in a state comes first."""
    return {state: {} for state in State if state is not State.COLD}


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """One sandbox of a pool."""

    number: int
    line: Line
    state: State = State.COLD
    since_s: float
    """When it came to this state."""
    holder: int | None = None
    """The requester that has it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Line:
    """One environment."""

    key: str
    alone: bool
    """Nobody else will ask for it."""
    demand: Demand
    waiting: int = 0
    members: dict[State, dict[int, Slot]] = field(default_factory=by_state)

    @property
    def empty(self) -> bool:
        """Whether there is nothing of it and nobody waits."""
        return not self.waiting and not any(self.members.values())
