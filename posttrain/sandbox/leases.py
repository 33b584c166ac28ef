"""The account of leases: which are open, sealed, closed or lost.

Pure: events in, no I/O. The one thing that must stay true: a lease is let go exactly once, and
every lease ever made is open, sealed, or counted as let go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from posttrain.core.errors import IllegalTransitionError


class LeaseState(StrEnum):
    """Where a lease is in its life."""

    OPEN = "open"
    SEALED = "sealed"
    LOST = "lost"
    """Its processes and files are gone with the holder; the owner does not know yet."""
    CLOSED = "closed"


TRANSITIONS: Mapping[LeaseState, frozenset[LeaseState]] = {
    LeaseState.OPEN: frozenset({LeaseState.SEALED, LeaseState.LOST, LeaseState.CLOSED}),
    LeaseState.SEALED: frozenset({LeaseState.LOST, LeaseState.CLOSED}),
    LeaseState.LOST: frozenset({LeaseState.CLOSED}),
    LeaseState.CLOSED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStats:
    """Numbers of leases."""

    made: int
    open: int
    sealed: int
    lost: int
    """Lost and not yet let go by their owners."""
    closed: int


class Leases:
    """All leases of one source, by name; closed ones are only counted."""

    def __init__(self) -> None:
        self._states: dict[str, LeaseState] = {}
        self._made = 0
        self._closed = 0

    def add(self) -> str:
        """A new open lease; returns its name."""
        self._made += 1
        name = f"s{self._made}"
        self._states[name] = LeaseState.OPEN
        return name

    def state(self, name: str) -> LeaseState:
        """Where a lease is."""
        return self._states.get(name, LeaseState.CLOSED)

    def move(self, name: str, state: LeaseState) -> None:
        """Take a lease to a state.

        Raises:
            IllegalTransitionError: the table does not hold this.
        """
        before = self.state(name)
        if state not in TRANSITIONS[before]:
            raise IllegalTransitionError(f"lease {name} is {before} and cannot become {state}.")
        if state is LeaseState.CLOSED:
            del self._states[name]
            self._closed += 1
        else:
            self._states[name] = state

    def lose(self) -> None:
        """The holder is gone, and with it everything that was open or sealed."""
        self._states = dict.fromkeys(self._states, LeaseState.LOST)

    def check(self) -> None:
        """Every lease made is accounted for."""
        assert self._made == len(self._states) + self._closed, self.stats()
        assert LeaseState.CLOSED not in self._states.values(), "a closed lease was kept"

    def stats(self) -> LeaseStats:
        """Numbers now."""
        states = list(self._states.values())
        return LeaseStats(
            made=self._made,
            open=states.count(LeaseState.OPEN),
            sealed=states.count(LeaseState.SEALED),
            lost=states.count(LeaseState.LOST),
            closed=self._closed,
        )
