"""Leases: the account of which are open, sealed, closed or lost, and what all drivers' share.

Each is a name and a line to what holds its files. The one thing that must stay true: a lease is let
go exactly once, and every lease ever made is open, sealed, or counted as let go.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from posttrain.core.errors import IllegalTransitionError, SandboxError, UsageError
from posttrain.core.task import Entry, EntryKind, Environment
from posttrain.sandbox import spec, wire
from posttrain.sandbox.channel import Channel


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


# --- what is leased ---------------------------------------------------------------------------


class Held:
    """What a lease and its sealed form share: a name and a line to what holds its files."""

    def __init__(self, name: str, channel: Channel, leases: Leases) -> None:
        self.name = name
        self.channel = channel
        self._leases = leases

    async def _ask(self, operation: str, body: bytes = b"", **head: Any) -> wire.Frame:
        """An answer of the holder.

        Raises:
            SandboxError: the holder is gone or could not do it. OSError: a file operation failed.
        """
        order = {"op": operation, "lease": self.name, **head}
        return wire.answered(await self.channel.request(order, body))

    async def read(self, path: str, *, max_bytes: int) -> bytes | None:
        """As the port says; a path that leaves the workspace names no file."""
        try:
            parts = spec.workspace_parts(path)
        except UsageError:
            return None
        answer = await self._ask("read", parts=parts, max_bytes=max_bytes)
        return answer.body if answer.head["found"] else None

    async def _close(self) -> None:
        """Let the lease go; sent at once, so that a cancelled caller changes nothing."""
        if self._leases.state(self.name) is LeaseState.CLOSED:
            return
        self._leases.move(self.name, LeaseState.CLOSED)
        answer = self.channel.post({"op": "close", "lease": self.name})
        with contextlib.suppress(SandboxError):
            await asyncio.shield(asyncio.wrap_future(answer))


class SealedWorkspace(Held):
    """What an attempt left (`containment.Sealed`), read-only in the holder."""

    async def entries(self, *, max_entries: int) -> tuple[Entry, ...]:
        """As the port says."""
        answer = await self._ask("entries", max_entries=max_entries)
        return tuple(
            Entry(path=path, kind=EntryKind(kind), mode=mode, size=size)
            for path, kind, mode, size in answer.head["entries"]
        )

    async def close(self) -> None:
        """As the port says."""
        await self._close()


class Leased(Held):
    """What the leases of all drivers share."""

    def __init__(self, channel: Channel, leases: Leases, environment: Environment) -> None:
        super().__init__(leases.add(), channel, leases)
        self._environment = environment
        self._thawed = asyncio.Event()
        self._thawed.set()

    def _ensure_open(self, name: str | None = None) -> None:
        name = name or self.name
        state = self._leases.state(name)
        if state is not LeaseState.OPEN:
            raise SandboxError(f"sandbox {name} is not open but {state}.")

    def _limit_s(self, argv: Sequence[str], timeout_s: float | None) -> float:
        """The time limit of a command, where there is a command, a time, and this is open."""
        self._ensure_open()
        limit_s = self._environment.exec_timeout_s if timeout_s is None else timeout_s
        if not argv or limit_s <= 0:
            raise UsageError(f"wanted a command and a time, got {list(argv)!r} and {limit_s} s.")
        return limit_s

    async def begin(self, argv: Sequence[str]) -> None:
        """As `source.Made`: a driver that starts nothing ahead."""

    async def write(self, path: str, data: bytes) -> None:
        """As the port says."""
        self._ensure_open()
        await self._ask("write", data, parts=spec.workspace_parts(path))
