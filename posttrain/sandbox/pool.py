"""Which sandboxes are kept warm and who gets one: the pool's decisions.

Pure: `moves` in and out, time as a value; `pooled` carries them out. A requester that no
instruction names goes on waiting: what is full is never an error. It reuses nothing: what was
handed out is ended when its holder leaves. The one thing that must stay true: a sandbox is handed
out at most once, and nobody waits for a start while there is room for one.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from dataclasses import dataclass

from posttrain.core.errors import IllegalTransitionError, UsageError
from posttrain.sandbox import moves
from posttrain.sandbox.moves import (
    PAUSE_S,
    TRANSITIONS,
    Demand,
    Event,
    Instruction,
    Line,
    Slot,
    State,
    by_state,
)

_ALMOST = 1e-6
"""What rounding may take from a whole start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Bounds of a pool."""

    max_alive: int = 64
    """Sandboxes alive at once, those that start or end included; who finds no room waits."""
    max_idle: int = 16
    """Kept warm for one environment at most, whatever the forecast says."""
    keep_s: float = 300.0
    """What nobody asked for during so many seconds is ended; the forecast halves in them."""
    starts_per_s: float = 200.0
    """Starts in a second, and at once after a pause."""

    def __post_init__(self) -> None:
        bounds = (self.max_alive >= 1, self.max_idle >= 0, self.keep_s > 0, self.starts_per_s >= 1)
        if not all(bounds):
            raise UsageError(
                f"wanted room for a sandbox, a time to keep and a rate of starts, got {self}.",
                "give max_alive and starts_per_s of 1 or more, keep_s above 0.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Numbers of a pool: now, and since it was made."""

    warming: int
    idle: int
    leased: int
    draining: int
    waiting: int
    keys: int
    """Environments that are remembered."""
    asked: int
    found_warm: int
    """Of these, the ones who found an idle sandbox and did not wait."""
    started: int
    failed: int
    """Could not be made or ended, or went without being told to."""
    dead: int
    """Found dead when handed out."""
    unused: int
    """Ended although nobody ever had them: for their age, for room, or as lost."""

    @property
    def alive(self) -> int:
        """All that take room."""
        return self.warming + self.idle + self.leased + self.draining


class Pool:
    """The state machine. `handle` takes an event and returns what is to be done, in order."""

    def __init__(self, settings: PoolSettings | None = None) -> None:
        self._settings = settings or PoolSettings()
        self._lines: OrderedDict[str, Line] = OrderedDict()
        """The one asked for last is the last."""
        self._waiting: list[int] = []
        """In the order of coming; who was handed a dead one comes back to its place."""
        self._asked: dict[int, Line] = {}
        """Of those who wait or hold one."""
        self._members = by_state()
        self._holding: dict[int, Slot] = {}
        self._now_s = float("-inf")
        self._starts_left = self._settings.starts_per_s
        self._starved = False
        """Whether more would be started if it were not for the rate."""
        self._short_s: float | None = None
        """Since when some stock is smaller than it might be."""
        self._closed = False
        self._out: list[Instruction] = []
        self._num_asked = self._num_warm = self._num_started = 0
        self._num_failed = self._num_dead = self._num_unused = 0

    def handle(self, event: Event, *, now_s: float) -> list[Instruction]:
        """Take note of an event at a time, which never goes back.

        Raises:
            IllegalTransitionError: it tells of a sandbox that is not there.
        """
        assert now_s >= self._now_s, f"time went back from {self._now_s} to {now_s}"
        rate = self._settings.starts_per_s
        self._starts_left = min(rate, self._starts_left + (now_s - self._now_s) * rate)
        self._now_s = now_s
        self._note(event)
        self._starved = False
        served = self._serve()
        self._reclaim()
        self._stock(ahead=served and not self._closed)
        if isinstance(event, moves.Ask) and event.requester in self._holding:
            self._num_warm += 1
        self._forget()
        out, self._out = self._out, []
        return out

    @property
    def due_s(self) -> float | None:
        """When a `Tick` will change something, if nothing happens before; None: never."""
        times = [self._due_of(line) for line in self._lines.values() if not line.alone]
        if self._starved:
            missing = max(0.0, 1 - self._starts_left)
            times.append(self._now_s + missing / self._settings.starts_per_s)
        elif self._short_s is not None:
            times.append(self._short_s + PAUSE_S)
        return min((time for time in times if time is not None), default=None)

    def _due_of(self, line: Line) -> float | None:
        keep_s, idle = self._settings.keep_s, line.members[State.IDLE]
        if idle and len(idle) > self._wanted(line):
            return next(iter(idle.values())).since_s + keep_s
        return line.demand.last_s + keep_s if idle or line.empty else None

    # --- taking note ------------------------------------------------------------------------------

    def _note(self, event: Event) -> None:
        match event:
            case moves.Ask():
                self._ask(event)
            case moves.Ready():
                sandbox = self._find(event.sandbox, State.IDLE)
                if sandbox.state is not State.DRAINING:
                    sandbox.line.demand.warmed(self._now_s - sandbox.since_s)
                    self._move(sandbox, State.IDLE)
            case moves.Gone():
                self._lose(self._find(event.sandbox, State.COLD), failed=event.failed)
            case moves.Dead():
                self._bury(event.requester)
            case moves.Left():
                self._leave(event.requester)
            case moves.Tick():
                pass
            case moves.Close():
                self._close()

    def _ask(self, ask: moves.Ask) -> None:
        if self._closed:
            self._out.append(moves.Refuse(requester=ask.requester, sandbox=None))
            if ask.key not in self._lines:
                self._out.append(moves.Forget(key=ask.key))
            return
        self._num_asked += 1
        line = self._lines.get(ask.key)
        if line is None:
            demand = Demand(keep_s=self._settings.keep_s)
            line = self._lines[ask.key] = Line(key=ask.key, alone=ask.alone, demand=demand)
        self._lines.move_to_end(ask.key)
        line.demand.ask(self._now_s)
        self._wait(ask.requester, line)

    def _wait(self, requester: int, line: Line) -> None:
        self._asked[requester] = line
        bisect.insort(self._waiting, requester)
        line.waiting += 1

    def _leave(self, requester: int) -> None:
        line = self._asked.pop(requester, None)
        if line is None:
            return
        held = self._holding.pop(requester, None)
        if held is not None:
            held.holder = None
            self._end(held)
            return
        self._waiting.remove(requester)
        line.waiting -= 1
        if line.alone:
            for sandbox in list(line.members[State.WARMING].values()):
                self._end(sandbox)

    def _lose(self, sandbox: Slot, *, failed: bool) -> None:
        """One that was not told to end has failed, and none is started ahead any more. If it was
        warming and now fewer are coming than are waited for, who waits longest is told.
        """
        line, before = sandbox.line, sandbox.state
        self._move(sandbox, State.COLD)
        if before is State.DRAINING:
            self._num_failed += failed
            return
        self._num_failed += 1
        line.demand.forget()
        if sandbox.holder is not None:
            del self._holding[sandbox.holder], self._asked[sandbox.holder]
        elif before is State.WARMING and line.waiting > len(line.members[State.WARMING]):
            oldest = next(one for one in self._waiting if self._asked[one] is line)
            self._leave(oldest)
            self._out.append(moves.Refuse(requester=oldest, sandbox=sandbox.number))

    def _bury(self, requester: int) -> None:
        """Nobody had touched it, so what kept it was lost, and with that probably all: the idle
        ones end, and the requester comes back to its place.
        """
        dead = self._holding.pop(requester, None)
        if dead is None:
            self._out.append(moves.Refuse(requester=requester, sandbox=None))
            return
        self._num_dead += 1
        dead.holder = None
        self._wait(requester, dead.line)
        for lost in (dead, *self._members[State.IDLE].values()):
            self._end(lost)

    def _close(self) -> None:
        self._closed = True
        for requester in list(self._waiting):
            self._leave(requester)
            self._out.append(moves.Refuse(requester=requester, sandbox=None))
        for requester in list(self._holding):
            self._leave(requester)
        for state in (State.WARMING, State.IDLE):
            for sandbox in list(self._members[state].values()):
                self._end(sandbox)

    # --- deciding ---------------------------------------------------------------------------------

    @property
    def _room(self) -> int:
        return self._settings.max_alive - sum(map(len, self._members.values()))

    def _wanted(self, line: Line) -> int:
        """How many idle ones the forecast wants."""
        expected = 0 if line.alone else line.demand.expected(self._now_s)
        return min(self._settings.max_idle, expected)

    def _serve(self) -> bool:
        """Whoever waits, in the order of coming, takes an idle sandbox, counts on one that is
        being warmed, has one started, or has room made; False where somebody lacks room or a start.
        """
        coming: dict[str, int] = {}
        leaving = len(self._members[State.DRAINING])
        all_served = True
        for requester in list(self._waiting):
            line = self._asked[requester]
            left = coming.setdefault(line.key, len(line.members[State.WARMING]))
            if idle := line.members[State.IDLE]:
                self._hand(next(iter(idle.values())), requester)
            elif left:
                coming[line.key] -= 1
            elif self._room > 0:
                all_served &= self._start(line)
            else:
                all_served = False
                if leaving:
                    leaving -= 1
                elif idle := self._members[State.IDLE]:
                    self._end(next(iter(idle.values())))
        return all_served

    def _reclaim(self) -> None:
        """Let those go that were idle for long and are more than the forecast wants."""
        for sandbox in list(self._members[State.IDLE].values()):
            if self._now_s < sandbox.since_s + self._settings.keep_s:
                return
            if len(sandbox.line.members[State.IDLE]) > self._wanted(sandbox.line):
                self._end(sandbox)

    def _stock(self, *, ahead: bool) -> None:
        """Start what the forecast wants, for what was asked last first, while there is room."""
        lacking = [(line, self._lacking(line)) for line in reversed(self._lines.values())]
        if not ahead or self._room <= 0 or not any(count > 0 for _, count in lacking):
            self._short_s = None
            return
        if self._short_s is None:
            self._short_s = self._now_s
        if self._now_s < self._short_s + PAUSE_S:
            return
        for line, count in lacking:
            for _ in range(min(count, self._room)):
                if not self._start(line):
                    return
        self._short_s = None

    def _lacking(self, line: Line) -> int:
        """How many the forecast wants beyond those there are."""
        there = len(line.members[State.IDLE]) + len(line.members[State.WARMING]) - line.waiting
        return self._wanted(line) - there

    def _forget(self) -> None:
        for key, line in list(self._lines.items()):
            over = line.alone or self._closed or line.demand.silent(self._now_s)
            if line.empty and over:
                del self._lines[key]
                self._out.append(moves.Forget(key=key))

    # --- moving -----------------------------------------------------------------------------------

    def _start(self, line: Line) -> bool:
        """False where the rate forbids it for now."""
        if self._starts_left < 1 - _ALMOST:
            self._starved = True
            return False
        self._starts_left -= 1
        self._num_started += 1
        sandbox = Slot(number=self._num_started, line=line, since_s=self._now_s)
        self._move(sandbox, State.WARMING)
        self._out.append(moves.Start(sandbox=sandbox.number, key=line.key))
        return True

    def _hand(self, sandbox: Slot, requester: int) -> None:
        self._move(sandbox, State.LEASED)
        sandbox.holder = requester
        self._holding[requester] = sandbox
        self._waiting.remove(requester)
        sandbox.line.waiting -= 1
        self._out.append(moves.Hand(sandbox=sandbox.number, requester=requester))

    def _end(self, sandbox: Slot) -> None:
        self._num_unused += sandbox.state is State.IDLE
        self._move(sandbox, State.DRAINING)
        self._out.append(moves.End(sandbox=sandbox.number))

    def _find(self, number: int, wanted: State) -> Slot:
        for members in self._members.values():
            if number in members:
                return members[number]
        raise IllegalTransitionError(f"sandbox {number} is cold and cannot become {wanted}.")

    def _move(self, sandbox: Slot, state: State) -> None:
        before = sandbox.state
        if state not in TRANSITIONS[before]:
            raise IllegalTransitionError(
                f"sandbox {sandbox.number} is {before} since {sandbox.since_s} s and cannot become "
                f"{state}."
            )
        for members in (self._members, sandbox.line.members):
            if before is not State.COLD:
                del members[before][sandbox.number]
            if state is not State.COLD:
                members[state][sandbox.number] = sandbox
        sandbox.state, sandbox.since_s = state, self._now_s

    # --- looking ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Invariants."""
        assert self._room >= 0, self.stats()
        assert self._waiting == sorted(set(self._waiting)), "the order of coming was lost"
        assert self._asked.keys() == {*self._waiting, *self._holding}, "a requester was lost"
        assert not self._waiting or not self._closed, "somebody waits for what is closed"
        leased = self._members[State.LEASED].values()
        assert {one.holder: one for one in leased} == self._holding, "leased to nobody, or to two"
        for key, line in self._lines.items():
            waiting = [one for one in self._waiting if self._asked[one] is line]
            assert (line.key, line.waiting) == (key, len(waiting)), f"{key}: {waiting} wait"
            assert not (waiting and line.members[State.IDLE]), f"{key}: idle beside who waits"
            lacking = len(waiting) > len(line.members[State.WARMING])
            full = self._room == 0 or self._starved
            assert full or not lacking, f"{key}: {waiting} wait although there is room"
            assert not (line.alone and line.members[State.IDLE]), f"{key}: idle for nobody"
        for state, members in self._members.items():
            for number, one in members.items():
                assert (one.number, one.state) == (number, state), f"{number} is not {state}"
                assert one.line.members[state][number] is one, f"{number} is in no line"
                assert self._lines[one.line.key] is one.line, f"{one.line.key} is forgotten"

    def stats(self) -> PoolStats:
        """Numbers now."""
        counts = {state.value: len(members) for state, members in self._members.items()}
        return PoolStats(
            **counts, waiting=len(self._waiting), keys=len(self._lines), asked=self._num_asked,
            found_warm=self._num_warm, started=self._num_started, failed=self._num_failed,
            dead=self._num_dead, unused=self._num_unused,
        )  # fmt: skip
