"""What can happen to a pool of sandboxes and what it can ask for: states, events, instructions.

    cold ──Start──▶ warming ──Ready──▶ idle ──Hand──▶ leased
     ▲                 │                │               │ Left, Dead
     │                 │ Left, Close    │ age, room     ▼
     └──────Gone───────┴────────────────┴────────▶ draining ──Gone──▶ cold

Plain records; what they do is `pool`'s. The one thing that must stay true: every `Start` is
answered by one `Gone` in the end, and every `Ask` by one `Left`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
