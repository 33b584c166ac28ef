"""What a pool of sandboxes knows, what can happen to it, and what it can ask for.

    cold ──Start──▶ warming ──Ready──▶ idle ──Hand──▶ leased
     ▲                 │                │               │ Left, Dead
     │                 │ Left, Close    │ age, room     ▼
     └──────Gone───────┴────────────────┴────────▶ draining ──Gone──▶ cold

Pure; what is done with it is `pool`'s. The one thing that must stay true: every `Start` is answered
by one `Gone` in the end, and every `Ask` by one `Left`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    """Where a sandbox is in its life. Cold ones are not kept: there is nothing of them."""

    COLD = "cold"
    WARMING = "warming"
    IDLE = "idle"
    LEASED = "leased"
    DRAINING = "draining"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.COLD: frozenset({State.WARMING}),
    State.WARMING: frozenset({State.IDLE, State.DRAINING, State.COLD}),
    State.IDLE: frozenset({State.LEASED, State.DRAINING, State.COLD}),
    State.LEASED: frozenset({State.DRAINING, State.COLD}),
    State.DRAINING: frozenset({State.COLD}),
}


# --- what there is ----------------------------------------------------------------------------

PAUSE_S = 0.05
"""So long nothing replaces what was taken from a stock: starting it would slow the first commands
of those who took it.
"""
_FIRST_GUESS_S = 0.05
"""How long warming is taken to take before it was seen."""


@dataclass(slots=True, kw_only=True)
class Demand:
    """The most that asked within the time in which one is replaced: the stock that spares waiting.

    Those who ask are counted in windows of that length; a window counts once the next has begun, so
    what is asked for all at once and never again is not stocked. The highest count is kept and
    halves in `keep_s` seconds.

    >>> demand = Demand(keep_s=60.0)
    >>> for now_s in (0.0, 0.0, 0.0): demand.ask(now_s)
    >>> demand.expected(0.0)
    0
    >>> demand.ask(10.0)
    >>> demand.expected(10.0), demand.expected(69.0), demand.expected(70.0)
    (3, 2, 0)
    """

    keep_s: float
    """After so long without anybody asking none is expected."""
    last_s: float = -math.inf
    """When somebody asked last."""
    _warming_s: float = _FIRST_GUESS_S
    _began_s: float = -math.inf
    _count: int = 0
    _peak: float = 0.0
    _peak_s: float = 0.0

    def ask(self, now_s: float) -> None:
        """Somebody asks."""
        if now_s - self._began_s > PAUSE_S + self._warming_s:
            self._peak = max(float(self._count), self._level(now_s))
            self._peak_s = self._began_s = now_s
            self._count = 0
        self._count += 1
        self.last_s = now_s

    def warmed(self, duration_s: float) -> None:
        """One was warmed in so many seconds."""
        self._warming_s = (self._warming_s + duration_s) / 2

    def forget(self) -> None:
        """It cannot be made: nothing is to be started ahead until it was asked for anew."""
        self._peak, self._count = 0.0, 0

    def expected(self, now_s: float) -> int:
        """How many will ask at once."""
        return 0 if self.silent(now_s) else int(self._level(now_s) + 0.5)

    def silent(self, now_s: float) -> bool:
        """Whether nobody asked for long."""
        return now_s >= self.last_s + self.keep_s

    def _level(self, now_s: float) -> float:
        if not self._peak:
            return 0.0
        return float(self._peak * 0.5 ** ((now_s - self._peak_s) / self.keep_s))


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


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A requester, numbered in the order of coming, wants a sandbox of an environment."""

    requester: int
    key: str
    alone: bool = False
    """Nobody else will ever ask for this key: nothing is kept warm for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A sandbox is warm. One that is draining meanwhile goes on draining."""

    sandbox: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Nothing of a sandbox is left: it could not be warmed, has ended as told, or was lost."""

    sandbox: int
    failed: bool = False
    """Whether that was an error: counted, where it was told to end and nobody waits to hear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """The sandbox that a requester was just handed does not answer; it wants another one."""

    requester: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A requester is done with its sandbox, or gave up waiting; one that is neither is ignored."""

    requester: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Everything ends, and who asks from now on is refused."""


Event = Ask | Ready | Gone | Dead | Left | Tick | Close


# --- instructions -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Make a sandbox of an environment and warm it; answered by `Ready` or `Gone`."""

    sandbox: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hand:
    """Give a sandbox to a requester; answered by `Dead` where it does not answer."""

    sandbox: int
    requester: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """End a sandbox; answered by `Gone`."""

    sandbox: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Tell a requester why it gets none: its sandbox could not be made, or (None) all is closed."""

    requester: int
    sandbox: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Nothing is started for an environment any more before somebody asks for it again."""

    key: str


Instruction = Start | Hand | End | Refuse | Forget
