"""The protocols at which the parts meet; every part supplies some and is handed others.

Ties are made in `loop.wiring` alone. The one thing that must stay true: nothing here names a
class of another part.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from posttrain.core.containment import Sealed
from posttrain.core.events import LedgerEvent, Note
from posttrain.core.task import Json, Lane, Message, Oracle, Task
from posttrain.core.trajectory import AttemptKey, Group, Row, Sampled, Sampling, Trajectory
from posttrain.core.verdict import Verdict

T = TypeVar("T")

# --- engine -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One request to a policy: continue these ids."""

    ids: tuple[int, ...]
    sampling: Sampling
    lane: Lane = Lane.TRAIN
    slot: str = "train"
    """Weight slot: `train`, `eval` or `serve`."""
    key: str = ""
    """Whose request it is (attempt key), for records and aborts."""
    media: tuple[str, ...] = ()


@runtime_checkable
class Policy(Protocol):
    """Tokens in, tokens out. Requests with equal ids in flight share their prefill."""

    async def sample(self, request: SampleRequest) -> Sampled:
        """Sample one continuation. Cancelling the awaiting task aborts the request.

        Raises:
            EngineError: the request could not be served.
        """
        ...


class Chat(Protocol):
    """Messages in, message out: what a judge needs."""

    async def reply(self, messages: Sequence[Message], *, max_tokens: int) -> Message:
        """One reply to a conversation."""
        ...


class Scores(Protocol):
    """A reward model."""

    @property
    def name(self) -> str:
        """Name and version."""
        ...

    async def score(self, task: Task, reply: str) -> float:
        """How good a reply to a task is, in [0, 1]; 0 for one that deserves nothing."""
        ...


class Work(StrEnum):
    """Kinds of work the compute thread runs."""

    ENGINE = "engine"
    TRAIN = "train"
    UPDATE = "update"


class Device(Protocol):
    """The one compute thread. Only work run through it touches tensors of the shared storage."""

    async def run(self, kind: Work, items: Generator[None, None, T]) -> T:
        """Run a generator on the compute thread; each `yield` ends one work item, between which
        other work may run. Its return value, or its exception, is the result.
        """
        ...


class DevicePolicy(Protocol):
    """Decides what the compute thread does next."""

    def choose(self, ready: frozenset[Work]) -> Work:
        """One of `ready` (never empty)."""
        ...


class WeightSink(Protocol):
    """Where published weights go."""

    async def publish(self, *, version: int, parent: int) -> None:
        """Make the trainer's current weights the engine's version `version`."""
        ...


# --- rollout and verification -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRequest:
    """One attempt to be made."""

    key: AttemptKey
    task: Task
    sampling: Sampling
    """`max_tokens` is the caller's cap; the task's own limits apply beside it."""
    lane: Lane = Lane.TRAIN
    slot: str = "train"
    tries: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """An attempt before its judgement. `sealed` belongs to the receiver, who closes it."""

    trajectory: Trajectory
    sealed: Sealed | None = None


class Executor(Protocol):
    """Carries out one kind of task."""

    async def run(self, request: AttemptRequest) -> Attempted:
        """Make the attempt. Never raises for what policy or infrastructure did: the trajectory's
        `outcome` is then `infra_failed` and `error` says why; otherwise `outcome` is None.
        """
        ...


class Verifier(Protocol):
    """Judges an attempt."""

    async def verify(self, trajectory: Trajectory, sealed: Sealed | None) -> Verdict:
        """All components, layer by layer. Failures of checks are component errors, not raises."""
        ...


class Domain(Protocol):
    """A named source of tasks. Everything is deterministic in its arguments."""

    @property
    def name(self) -> str:
        """Unique name, `family.kind` or `source.kind`."""
        ...

    @property
    def levels(self) -> int:
        """Number of levels of difficulty; levels are 0 … levels-1, easiest first."""
        ...

    def task(self, seed: int, level: int) -> Task:
        """The task of a seed at a level."""
        ...

    def oracle(self, task: Task) -> Oracle:
        """A reference solution that earns reward 1."""
        ...


# --- training ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One supervised row: mask marks the tokens to imitate."""

    row: Row
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimiser step did."""

    step: int
    """Running number of the step this report is about, from 1."""
    loss: float | None
    """None: nothing was trainable and no parameter changed (`skipped` says why)."""
    grad_norm: float | None = None
    num_tokens: int = 0
    """Tokens with a loss."""
    num_sequences: int = 0
    duration_s: float = 0.0
    skipped: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Only metrics that had at least one valid token."""


class Trainer(Protocol):
    """Changes the weights."""

    async def rl_step(self, groups: Sequence[Group], *, version: int) -> StepReport:
        """One policy-gradient step on groups, from the weights published as `version`.

        Raises:
            NonFiniteError: a loss or gradient was not finite; no parameter changed.
        """
        ...

    async def sft_step(self, examples: Sequence[Example]) -> StepReport:
        """One supervised step."""
        ...

    async def save(self, directory: Path, *, extra: Mapping[str, Json]) -> None:
        """Write weights, optimiser, random state and `extra` (data position), atomically."""
        ...

    async def load(self, directory: Path) -> Mapping[str, Json]:
        """Restore all of it; returns `extra`.

        Raises:
            CheckpointError: incomplete, damaged or of another model.
        """
        ...


# --- observation ------------------------------------------------------------------------------


class Ledger(Protocol):
    """The durable account: append-only, one event a line."""

    def append(self, event: LedgerEvent) -> None:
        """Write an event. Raises LedgerError where it cannot be written; the run must stop."""
        ...

    def sync(self) -> None:
        """Everything appended is on disk when this returns."""
        ...

    def events(self) -> Iterable[LedgerEvent]:
        """All events, oldest first; a torn last line is ignored and truncated at open."""
        ...


class Journal(Protocol):
    """The record of everything else. May lag and, under stress, lose and count; never raises."""

    def write(self, note: Note) -> str:
        """Append; returns the place of the record (`segment:offset:length`), '' if it was lost."""
        ...

    def read(self, place: str) -> Note | None:
        """The record at a place, or None where it cannot be read back whole."""
        ...

    def sync(self) -> None:
        """Push what is buffered to disk, as far as that is possible."""
        ...


class Blobs(Protocol):
    """Large bodies by content hash."""

    def put(self, data: bytes) -> str:
        """Store; returns the SHA-256 in hexadecimal."""
        ...

    def get(self, sha256: str) -> bytes:
        """The bytes; raises KeyError where there are none."""
        ...


class Recorder(Protocol):
    """What the loop tells whoever watches (progress display, heartbeat, dashboard)."""

    def record(self, kind: str, data: Mapping[str, Json]) -> None:
        """Take note; never raises, never blocks."""
        ...


class Clock(Protocol):
    """Time, injected."""

    def now_s(self) -> float:
        """Monotonic seconds."""
        ...

    def wall_s(self) -> float:
        """Seconds since the epoch."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Sleep."""
        ...
