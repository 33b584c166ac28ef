"""What can happen to an attempt and what it can ask for: its events and instructions.

Plain records; what they do is `attempt`'s. The one thing that must stay true: every instruction
but `Stop` is answered by exactly one event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.core.task import ToolCall
from posttrain.core.trajectory import Sampled
from posttrain.core.verdict import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of what can happen to an attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    """The attempt may begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replied(Event):
    """The policy sampled a turn; `text` is its text without the end token."""

    sampled: Sampled
    text: str
    duration_s: float = 0.0
    """Seconds from request to reply, queueing included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed(Event):
    """All calls of an `Execute` were carried out: call id → what came back."""

    results: Mapping[str, str]
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut(Observed):
    """The time limit was reached while executing; `results` of the calls that were reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """Infrastructure failed, also after the stop (what was left could not be kept)."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(Event):
    """The attempt is not wanted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Sample at most `max_tokens` tokens behind `ids`."""

    ids: tuple[int, ...]
    max_tokens: int
    turn: int
    """Index of the turn, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execute:
    """Carry these calls out, one after the other, in at most `timeout_s` together."""

    calls: tuple[ToolCall, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Nothing more is to be done."""

    reason: StopReason


Instruction = Sample | Execute | Stop
