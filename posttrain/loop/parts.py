"""What the driver is handed: the parts of a run behind the narrowest seams it needs.

Protocols and plain data, built by `loop.wiring` (or by a test). The one thing that must stay true:
nothing here is optional and nothing has a second way of being reached.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from posttrain.core.events import Drawn, Evaluated
from posttrain.core.ports import (
    AttemptRequest,
    Clock,
    Journal,
    Ledger,
    Recorder,
    Trainer,
    WeightSink,
    Work,
)
from posttrain.core.task import Task
from posttrain.core.trajectory import Group, Sampling, Trajectory
from posttrain.domains import mixture
from posttrain.evals.metrics import Evaluation
from posttrain.loop.moves import Phase


class Source(Protocol):
    """Decides draws; a pure function of its arguments, so that a draw can be decided again."""

    def draw(self, number: int, *, without: frozenset[str]) -> mixture.Draw | None:
        """What a draw falls on, leaving out quarantined domains; None: nothing is left."""
        ...


class Tasks(Protocol):
    """Makes tasks where a domain's code may run."""

    async def task(self, drawn: Drawn) -> Task:
        """The task of a draw.

        Raises:
            DomainError: the domain raised, hung or broke its contract.
        """
        ...


class GroupRunner(Protocol):
    """Makes the attempts of one task (`rollout.group.Groups`)."""

    async def run(
        self,
        requests: Sequence[AttemptRequest],
        on_finished: Callable[[Trajectory], None] | None = None,
    ) -> Group:
        """All attempts to their verdicts, side by side."""
        ...


class Checkpoints(Protocol):
    """Where checkpoints lie and which may go."""

    def place(self, step: int) -> Path:
        """Where the checkpoint of a step belongs."""
        ...

    def retire(self, step: int) -> None:
        """Remove those that are not needed once `step` is saved."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Where a run is written down."""

    ledger: Ledger
    journal: Journal
    recorder: Recorder
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything a driver acts through."""

    run: str
    """Name of the run, part of every attempt's identity."""
    directory: Path
    """The run's folder; paths in the ledger are relative to it."""
    records: Records
    sources: Mapping[Phase, Source]
    tasks: Tasks
    groups: Mapping[Phase, GroupRunner]
    """Who makes attempts in a phase: oracles in `sft`, the policy in `rl`."""
    sampling: Mapping[Phase, Sampling]
    trainer: Trainer
    sinks: Sequence[WeightSink]
    handing_over: Callable[[int, int], AbstractContextManager[None]]
    """Around a step: (version, parent) its update makes, for an engine over the same storage."""
    checkpoints: Checkpoints
    evaluate: Callable[[Evaluated], Awaitable[Evaluation]]
    """Run the suite at a point of the run, and write the result down."""
    busy_s: Callable[[], Mapping[Work, float]]
    """Seconds the compute thread was busy since it started, by kind of work."""
    hold_alarms: bool = True
    """Whether a domain is held out of training once its verifier's monitor raises an alarm."""
    rl_seconds: float | None = None
    """Budget of the RL phase; None: none."""
