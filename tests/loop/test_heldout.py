"""The held-out suite of a run whose domains have few tasks, and what watchers are told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from posttrain.core.clock import ManualClock
from posttrain.core.events import Evaluated
from posttrain.core.task import Check, Description, Oracle, OracleTurn, Task
from posttrain.core.trajectory import Trajectory
from posttrain.core.verdict import Outcome, Verdict
from posttrain.domains.mixture import Key
from posttrain.evals.suite import Evaluator
from posttrain.loop.heldout import HeldOut
from posttrain.loop.parts import Records
from posttrain.observe.journal import FileJournal, read_notes
from tests.loop.scripted_run import Watching

SIZES = {"many": 100, "few": 2, "none": 0}


class Supply:
    """As many held-out tasks of a domain as `SIZES` says."""

    async def pool(self, key: Key, *, root_seed: int, count: int) -> tuple[Task, ...]:
        return tuple(
            Task(
                domain=key.domain,
                level=0,
                seed=n,
                description=Description(objective=f"{key.domain} {n}"),
                checks=(Check(kind="exact"),),
            )
            for n in range(min(count, SIZES[key.domain]))
        )

    async def oracles(self, key: Key, tasks: Sequence[Task]) -> tuple[Oracle, ...]:
        return tuple(Oracle(turns=(OracleTurn(text="1"),)) for _ in tasks)


class Silent:
    """Attempts that say nothing, and a verifier that has no opinion."""

    async def attempt(self, request: Any) -> Trajectory:
        said = Trajectory(key=request.key, task=request.task)
        return said.judged(Verdict(components=()), Outcome.SCORED)

    async def verify(self, trajectory: Trajectory, surroundings: object) -> Verdict:
        return Verdict(components=())


def test_a_domain_with_few_tasks_is_evaluated_on_those_and_one_without_is_left_out_aloud(
    tmp_path: Path,
) -> None:
    async def pin(slot: str) -> int:
        return 0

    keys = [Key(domain=name, level=0, reference=name) for name in SIZES]
    watching, journal = Watching(), FileJournal(tmp_path)
    parts = Silent()
    evaluator = Evaluator(cast("Any", parts), cast("Any", parts), ManualClock())
    heldout = HeldOut(
        keys[:1],
        watch=keys[1:],
        count=lambda domain: 5,
        supply=cast("Any", Supply()),
        evaluator=evaluator,
        remembering=evaluator,
        pin=pin,
        named=str,
        records=Records(
            ledger=cast("Any", None), journal=journal, recorder=watching, clock=ManualClock()
        ),
    )
    asyncio.run(heldout.evaluate(Evaluated(point="base", step=0, version=0)))
    journal.close()
    assert [data["message"] for data in watching.of("warning")] == [
        "few is evaluated on 2 held-out tasks instead of 5: it has no more.",
        "Not evaluated: none has no held-out task. Next: choose a level with a larger question "
        "space, or a larger domains.heldout_share",
    ]
    assert [data["message"] for data in watching.of("heartbeat")] == [
        f"evaluated {n} of 7 held-out tasks" for n in range(1, 8)
    ]
    (note,) = [note for note in read_notes(tmp_path) if note.kind == "eval"]
    told = {name: (len(e["results"]), e["watch"]) for name, e in note.data["domains"].items()}
    assert told == {"many": (5, False), "few": (2, True)}
