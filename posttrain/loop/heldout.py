"""The held-out suite at the named points of a run, written down for the report.

It computes no statistics (`evals` does). The one thing that must stay true: what is evaluated is a
pinned copy of one version, so nothing that trains beside it can change a result.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from posttrain.core import codec
from posttrain.core.events import Note
from posttrain.core.trajectory import Trajectory
from posttrain.evals import metrics
from posttrain.evals.metrics import Evaluation
from posttrain.evals.suite import Evaluator, Suite
from posttrain.loop.parts import Records

SLOT = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How versions are named for evaluations."""

    run: str
    starting: Callable[[], str]
    """Content hash of the weights before any training."""

    def name(self, version: int) -> str:
        """A name that these weights share with no others."""
        return f"{self.run}@{version}" if version else self.starting()


class HeldOut:
    """Evaluates versions of one run. Results of the starting weights are remembered between runs
    (`remembering`); those of trained ones belong to their run alone.
    """

    def __init__(
        self,
        build: Callable[[], Awaitable[Suite]],
        *,
        evaluator: Evaluator,
        remembering: Evaluator,
        pin: Callable[[str], Awaitable[int]],
        weights: Weights,
        records: Records,
    ) -> None:
        self._build = build
        self._evaluator = evaluator
        self._remembering = remembering
        self._pin = pin
        self._weights = weights
        self._records = records
        self._suite: Suite | None = None
        self._ended = 0

    async def evaluate(self, point: str, version: int) -> Evaluation:
        """Run the suite on the trainer's current weights, which are `version`.

        Raises:
            DomainError: a domain cannot make its held-out tasks.
        """
        if self._suite is None:
            self._suite = await self._build()
        await self._pin(SLOT)
        self._ended = 0
        evaluator = self._evaluator if version else self._remembering
        evaluation = await evaluator.evaluate(
            self._suite, weights=self._weights.name(version), slot=SLOT, on_finished=self._ended_one
        )
        data = metrics.note_data(evaluation, point)
        self._records.journal.write(Note(kind="eval", data=data))
        self._records.recorder.record("eval", data)
        return evaluation

    def _ended_one(self, trajectory: Trajectory) -> None:
        """Keep an evaluated attempt for the report, without its tokens."""
        data = codec.to_json(replace(trajectory, rows=()))
        self._records.journal.write(Note(kind="trajectory", key=trajectory.key.hex, data=data))
        self._ended += 1
        told = {"message": f"evaluated {self._ended} held-out tasks"}
        self._records.recorder.record("heartbeat", told)
