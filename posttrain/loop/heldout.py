"""The held-out suite at points of a run, written down for the report.

It computes no statistics (`evals` does). The one thing that must stay true: what is evaluated is a
pinned copy of one version, so nothing that trains beside it can change a result.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from posttrain.core import codec
from posttrain.core.errors import DomainError
from posttrain.core.events import Evaluated, Note
from posttrain.core.task import Json
from posttrain.core.trajectory import Trajectory
from posttrain.domains.mixture import Key
from posttrain.domains.supply import Supply
from posttrain.evals import metrics
from posttrain.evals.metrics import Evaluation
from posttrain.evals.suite import Evaluator, Suite, build
from posttrain.loop.parts import Records

SLOT = "eval"
SUITE_SEED = 0
"""Runs of every seed are evaluated on the same held-out tasks."""


class HeldOut:
    """Evaluates versions of one run on the held-out tasks of its domains. Results of the starting
    weights are remembered between runs (`remembering`); those of trained ones belong to their run.
    `named`: a name of a version's weights that they share with no others.
    """

    def __init__(
        self,
        train: Sequence[Key],
        *,
        watch: Sequence[Key],
        count: Callable[[str], int],
        supply: Supply,
        evaluator: Evaluator,
        remembering: Evaluator,
        pin: Callable[[str], Awaitable[int]],
        named: Callable[[int], str],
        records: Records,
    ) -> None:
        self._keys = (*train, *watch)
        self._watch = frozenset(key.domain for key in watch)
        self._count = count
        self._supply = supply
        self._evaluator = evaluator
        self._remembering = remembering
        self._pin = pin
        self._named = named
        self._records = records
        self._suite: Suite | None = None
        self._ended = 0

    async def evaluate(self, here: Evaluated) -> Evaluation:
        """Run the suite on the trainer's current weights, which are those of `here`."""
        if self._suite is None:
            self._suite = await self._build()
        await self._pin(SLOT)
        self._ended = 0
        evaluator = self._evaluator if here.version else self._remembering
        evaluation = await evaluator.evaluate(
            self._suite,
            weights=self._named(here.version),
            slot=SLOT,
            on_finished=functools.partial(self._ended_one, self._suite),
        )
        told = metrics.note_data(evaluation, here.point, watch=self._watch)
        self._note("eval", {**told, "step": here.step, "version": here.version})
        return evaluation

    async def _build(self) -> Suite:
        """The tasks of every domain that can make them; the others are named in a warning."""
        built: list[Suite] = []
        for domain in dict.fromkeys(key.domain for key in self._keys):
            own = [key for key in self._keys if key.domain == domain]
            try:
                one = await build(
                    own, per_domain=self._count(domain), supply=self._supply, root_seed=SUITE_SEED
                )
            except DomainError as error:
                self._note("warning", {"message": f"Not evaluated: {error}"})
                continue
            if len(one.tasks) < self._count(domain):
                told = (
                    f"{domain} is evaluated on {len(one.tasks)} held-out tasks instead of "
                    f"{self._count(domain)}: it has no more."
                )
                self._note("warning", {"message": told})
            built.append(one)
        return Suite(
            tasks=tuple(task for one in built for task in one.tasks),
            golds=tuple(gold for one in built for gold in one.golds),
        )

    def _note(self, kind: str, data: Mapping[str, Json]) -> None:
        self._records.journal.write(Note(kind=kind, data=data))
        self._records.recorder.record(kind, data)

    def _ended_one(self, suite: Suite, trajectory: Trajectory) -> None:
        """Keep an evaluated attempt for the report, without its tokens."""
        data = codec.to_json(replace(trajectory, rows=()))
        self._records.journal.write(Note(kind="trajectory", key=trajectory.key.hex, data=data))
        self._ended += 1
        told = f"evaluated {self._ended} of {len(suite.tasks)} held-out tasks"
        self._records.recorder.record("heartbeat", {"message": told})
