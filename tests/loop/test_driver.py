"""The driver over scripted parts: what a run does, and what is left when it goes wrong."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.core import events
from posttrain.core.errors import CheckpointError, LedgerError, NonFiniteError
from posttrain.core.events import LedgerEvent, Trained
from posttrain.core.ports import StepReport
from posttrain.core.task import Description, Task
from posttrain.loop.health import WINDOW
from posttrain.loop.past import fold
from posttrain.observe.journal import read_notes
from posttrain.observe.ledger import read_events
from tests.loop.scripted_run import ScriptedSource, ScriptedTasks, World


def ledger(directory: Path) -> list[LedgerEvent]:
    return list(read_events(directory / "ledger.jsonl"))


def exact(directory: Path) -> Any:
    account = fold(read_events(directory / "ledger.jsonl")).account
    account.check()
    stats = account.stats()
    assert stats.entered == stats.trained + sum(stats.dropped.values()) + stats.pending
    return stats


def batches(directory: Path) -> dict[int, list[int]]:
    """Draws by step, as last trained."""
    entered = {e.key: e.draw for e in ledger(directory) if isinstance(e, events.Entered)}
    trained = (event for event in ledger(directory) if isinstance(event, Trained))
    return {one.step: sorted({entered[key] for key in one.keys}) for one in trained}


def test_a_synchronous_run_from_start_to_end(tmp_path: Path) -> None:
    world = World(tmp_path)
    ending = world.run()
    assert (ending.reason, ending.step, ending.failed) == ("done", 5, False)
    assert ending.saved_step == 5
    assert world.model.batches == [[], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert [point for point, _ in world.evaluated] == ["base", "rl"]
    stats = exact(tmp_path)
    assert (stats.entered, stats.trained, stats.pending) == (18, 18, 0)
    kinds = Counter(event.kind for event in ledger(tmp_path))
    assert kinds == {
        "started": 1, "drawn": 10, "entered": 18, "finished": 18, "trained": 5, "published": 5,
        "saved": 3, "evaluated": 2, "ended": 1,
    }  # fmt: skip
    saved = [event.path for event in ledger(tmp_path) if isinstance(event, events.Saved)]
    assert saved == [f"checkpoints/step-{step:06d}" for step in (1, 3, 5)]
    assert all((tmp_path / path / "state.json").exists() for path in saved)


def test_what_watches_is_told_everything_a_display_needs(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run()
    steps = world.watching.of("step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert [phase["phase"] for phase in world.watching.of("phase")] == ["sft", "rl"]
    last = steps[-1]
    assert last["tokens"] == 4
    assert sum(domain["n"] for domain in last["domains"].values()) == 4
    assert set(last["seconds"]) == {"generate", "execute", "verify", "train", "idle"}
    assert last["metrics"]["loss"] == 0.5
    notes = list(read_notes(tmp_path / "journal"))
    assert sum(note.kind == "trajectory" for note in notes) == 18
    assert [note.data for note in notes if note.kind == "step"] == [dict(step) for step in steps]


def test_an_asynchronous_run_overlaps_and_keeps_its_bound(tmp_path: Path) -> None:
    world = World(tmp_path, staleness=1, steps=8, delay=lambda draw: 1 + 7 * (draw % 3))
    overlapped = []

    def watch(event: LedgerEvent) -> None:
        if isinstance(event, events.Drawn) and world.driver is not None:
            overlapped.append(str(world.driver.stats().stage))

    world.on_append = watch
    assert world.run().reason == "done"
    assert {"training", "publishing"} & set(overlapped)
    assert world.model.max_age == 1
    stats = exact(tmp_path)
    assert stats.pending == 0
    assert len(batches(tmp_path)) == 9
    assert all(len(draws) == 2 for draws in batches(tmp_path).values())


def test_a_synchronous_run_never_trains_on_older_weights(tmp_path: Path) -> None:
    world = World(tmp_path, steps=6)
    world.run()
    assert world.model.max_age == 0


def test_a_broken_domain_is_quarantined_and_the_rest_goes_on(tmp_path: Path) -> None:
    world = World(
        tmp_path, steps=12, sft_steps=0, size=4, tasks=ScriptedTasks(frozenset({"b"})),
        failing={"c": "the checker hung"},
    )  # fmt: skip
    assert world.run().reason == "done"
    told = {data["domain"]: data["evidence"] for data in world.watching.of("quarantine")}
    assert set(told) == {"b", "c"}
    assert "KeyError" in told["b"]
    assert "the checker hung" in told["c"]
    stats = exact(tmp_path)
    assert set(stats.dropped) == {"domain_error", "verifier_failed"}
    assert stats.trained == 12 * 2 * 4
    after = [e for e in ledger(tmp_path) if isinstance(e, events.Drawn)][-4:]
    assert {event.domain for event in after} == {"a"}
    health = fold(ledger(tmp_path)).position().health
    assert {name: one.stats().failures for name, one in health.items()} == {"a": 0, "b": 8, "c": 8}
    assert health["a"].stats().attempts == WINDOW


def test_a_run_whose_only_domain_fails_ends_as_failed_with_the_message(tmp_path: Path) -> None:
    # BR-24: it must not look alive for ever
    world = World(
        tmp_path, sft_steps=0, points=frozenset(), source=ScriptedSource(domains=("a",)),
        failing={"a": "status 400: no such model"},
    )  # fmt: skip
    ending = world.run()
    assert ending.failed
    assert "every domain left is quarantined or held: a (" in ending.reason
    assert "status 400: no such model" in ending.reason
    assert exact(tmp_path).trained == 0


def test_a_source_that_runs_dry_ends_the_run_and_says_so(tmp_path: Path) -> None:  # BR-24
    world = World(tmp_path / "five", sft_steps=0, source=ScriptedSource(total=5))
    ending = world.run()
    assert ending.reason == "done"
    assert world.model.batches == [[0, 1], [2, 3], [4]]
    warning = world.watching.of("warning")[0]["message"]
    assert warning.startswith("The source of tasks ran dry in phase rl after step 3 of 4")
    short = World(
        tmp_path / "two", sft_steps=0, groups_per_step=4, source=ScriptedSource(total=2)
    )  # fmt: skip
    assert short.run().reason == "done"  # 2 groups, where 4 are wanted
    assert short.model.batches == [[0, 1]]
    warning = short.watching.of("warning")[0]["message"]
    assert "ran dry in phase rl after step 1 of 4: there are no more tasks to draw" in warning


def test_the_time_budget_ends_the_phase_after_the_step(tmp_path: Path) -> None:
    world = World(tmp_path, sft_steps=1, steps=50, rl_seconds=3.0)

    def tick(event: LedgerEvent) -> None:
        if isinstance(event, events.Drawn):
            world.clock.advance(0.5)

    world.on_append = tick
    ending = world.run()
    assert ending.reason == "done"
    assert ending.step == 1 + 3  # one second a step; the supervised phase is not counted
    assert [point for point, _ in world.evaluated] == ["base", "rl"]


# --- interruption -----------------------------------------------------------------------------


def test_the_first_interrupt_finishes_the_step_saves_and_stops(tmp_path: Path) -> None:
    world = World(tmp_path, save_every=100)

    def interrupt(event: LedgerEvent) -> None:
        if isinstance(event, events.Drawn) and event.draw == 5 and world.driver:
            world.driver.interrupt()

    world.on_append = interrupt
    ending = world.run()
    assert (ending.reason, ending.step) == ("interrupted", 3)
    assert isinstance(ledger(tmp_path)[-2], events.Saved)
    assert ledger(tmp_path)[-1] == events.Ended(reason="interrupted")
    again = World(tmp_path)
    assert again.run().reason == "done"
    assert batches(tmp_path) == {1: [0, 1], 2: [2, 3], 3: [4, 5], 4: [6, 7], 5: [8, 9]}
    assert exact(tmp_path).pending == 0


def test_the_second_interrupt_stops_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def body() -> Any:
        world.policy.hold = asyncio.Event()
        run = asyncio.create_task(world.start())
        while world.driver is None or world.driver.stats().open < 2:
            await asyncio.sleep(0)
        for _ in range(30):
            await asyncio.sleep(0)
        world.driver.interrupt()
        await asyncio.sleep(0)
        assert not run.done()
        world.driver.interrupt()
        return await run

    ending = asyncio.run(body())
    assert ending.reason == "interrupted"
    assert ending.account.pending == 4
    again = World(tmp_path)
    assert again.run().reason == "done"
    assert batches(tmp_path)[2] == [2, 3]


# --- failures ---------------------------------------------------------------------------------


def test_nan_in_a_gradient_stops_with_one_paragraph_and_loses_nothing(tmp_path: Path) -> None:
    """The weights that gave it were saved, and every resume failed again at once."""
    world = World(tmp_path, save_every=100)

    def poison(event: LedgerEvent) -> None:
        if isinstance(event, Trained) and event.step == 3:
            world.model.fail_step = NonFiniteError(
                "the loss of step 4 is nan; no weight was changed.", "lower the learning rate"
            )

    world.on_append = poison
    ending = world.run()
    assert ending.reason == (
        "failed: the loss of step 4 is nan; no weight was changed. A resume goes on from "
        "checkpoints/step-000001. Next: lower the learning rate"
    )
    assert (ending.step, ending.saved_step) == (3, 1)
    stats = exact(tmp_path)
    assert (stats.trained, stats.pending) == (2 + 8, 4)
    assert World(tmp_path).run().reason == "done"
    rewound = [event for event in ledger(tmp_path) if isinstance(event, events.Rewound)]
    assert rewound == [events.Rewound(step=1, version=1)]
    assert batches(tmp_path)[4] == [6, 7]


@pytest.mark.parametrize(
    ("failing", "where", "rewound"),
    [
        (4, "goes on from checkpoints/step-000002", events.Rewound(step=2, version=2)),
        (2, "begins with the starting weights", events.Rewound(step=0, version=0)),
    ],
)
def test_no_resume_goes_on_from_weights_that_failed_once_they_were_saved(
    tmp_path: Path, failing: int, where: str, rewound: events.Rewound
) -> None:
    world = World(tmp_path, save_every=1)

    def poison(event: LedgerEvent) -> None:
        if isinstance(event, events.Saved) and event.step == failing - 1:
            world.model.fail_step = NonFiniteError("the loss is nan.", "lower it")

    world.on_append = poison
    ending = world.run()
    assert ending.reason == f"failed: the loss is nan. A resume {where}. Next: lower it"
    assert (ending.step, ending.saved_step) == (failing - 1, rewound.step)
    assert World(tmp_path).run().reason == "done"
    assert [event for event in ledger(tmp_path) if isinstance(event, events.Rewound)] == [rewound]
    exact(tmp_path)


def test_a_checkpoint_of_weights_that_failed_is_kept_where_no_other_is_left(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, save_every=1)

    def poison(event: LedgerEvent) -> None:
        if isinstance(event, events.Saved) and event.step == 3:
            shutil.rmtree(tmp_path / "checkpoints" / "step-000002")  # as `run.keep` 1 does
            world.model.fail_step = NonFiniteError("the loss is nan.")

    world.on_append = poison
    reason = "failed: the loss is nan. A resume goes on from checkpoints/step-000003."
    assert world.run().reason == reason


def test_a_full_disk_while_saving_stops_and_the_earlier_checkpoint_stays(tmp_path: Path) -> None:
    world = World(tmp_path)

    def fill(event: LedgerEvent) -> None:
        if isinstance(event, Trained) and event.step == 3:
            world.model.fail_save = CheckpointError(
                "the checkpoint step-000003 could not be written: no space.", "free space"
            )

    world.on_append = fill
    ending = world.run()
    assert ending.reason.startswith("failed: the checkpoint step-000003 could not be written")
    assert ending.reason.endswith("Next: free space")
    again = World(tmp_path)
    assert again.run().reason == "done"
    rewound = [event for event in ledger(tmp_path) if isinstance(event, events.Rewound)]
    assert rewound == [events.Rewound(step=1, version=1)]
    assert batches(tmp_path) == {1: [0, 1], 2: [2, 3], 3: [4, 5], 4: [6, 7], 5: [8, 9]}


def test_a_ledger_that_cannot_be_written_stops_the_run_at_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    refused: list[str] = []

    def refuse(event: LedgerEvent) -> None:
        if refused or (isinstance(event, events.Finished) and event.key and world.model.step == 2):
            refused.append(event.kind)
            raise LedgerError("Cannot write the ledger: No space left on device.", "free space")

    world.on_append = refuse
    ending = world.run()
    assert ending.reason.startswith("failed: Cannot write the ledger")
    assert world.model.step == 2
    assert World(tmp_path).run().reason == "done"
    assert exact(tmp_path).pending == 0


def test_a_mistake_of_ours_surfaces_and_the_ledger_says_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.model.fail_step = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        world.run()
    ended = ledger(tmp_path)[-1]
    assert isinstance(ended, events.Ended)
    assert ended.reason == "failed: ZeroDivisionError: a bug"


# --- resuming ---------------------------------------------------------------------------------


def test_a_damaged_newest_checkpoint_is_left_out_aloud(tmp_path: Path) -> None:
    World(tmp_path, steps=3).run()
    (tmp_path / "checkpoints/step-000004/state.json").write_text('{"weights": "tru')
    world = World(tmp_path)
    assert world.run().reason == "done"
    assert "step-000004 is left out" in world.watching.of("warning")[0]["message"]
    rewound = [event for event in ledger(tmp_path) if isinstance(event, events.Rewound)]
    assert rewound == [events.Rewound(step=3, version=3)]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin(tmp_path: Path) -> None:
    World(tmp_path).run()
    for path in (tmp_path / "checkpoints").glob("*/state.json"):
        path.unlink()
    with pytest.raises(CheckpointError, match="None of the 3 checkpoints"):
        World(tmp_path).run()


def test_a_finished_run_resumes_to_nothing_but_done(tmp_path: Path) -> None:  # BR-61
    World(tmp_path).run()
    before = exact(tmp_path)
    world = World(tmp_path)
    assert world.run().reason == "done"
    assert world.evaluated == []
    assert exact(tmp_path) == before


def test_a_finished_run_with_more_steps_is_evaluated_anew_even_if_killed_before(
    tmp_path: Path,
) -> None:
    """Its report went on showing the weights of its earlier end."""
    World(tmp_path).run()
    longer = World(tmp_path, steps=6)

    def crash(event: LedgerEvent) -> None:
        if isinstance(event, events.Evaluated):
            raise KeyboardInterrupt

    longer.on_append = crash
    with pytest.raises(KeyboardInterrupt):
        longer.run()
    assert longer.evaluated == [("rl", longer.model.weights)]
    assert longer.model.step == 7
    again = World(tmp_path, steps=6)
    assert again.run().reason == "done"
    assert again.evaluated == [("rl", longer.model.weights)]
    past = fold(read_events(tmp_path / "ledger.jsonl"))
    assert {(one.point, one.step) for one in past.evaluated} == {("base", 0), ("rl", 7)}


def test_steps_of_a_later_phase_leave_the_evaluation_of_an_earlier_one_alone(
    tmp_path: Path,
) -> None:
    points = frozenset({"base", "sft", "rl"})
    World(tmp_path, points=points).run()
    longer = World(tmp_path, points=points, steps=6)
    longer.run()
    assert [point for point, _ in longer.evaluated] == ["rl"]


def test_attempts_of_the_cut_are_reused_and_those_of_rolled_back_weights_are_made_again(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, save_every=100, sft_steps=0)

    def crash(event: LedgerEvent) -> None:
        if isinstance(event, Trained) and event.step == 3:
            raise KeyboardInterrupt

    world.on_append = crash
    with pytest.raises(KeyboardInterrupt):
        world.run()
    again = World(tmp_path, sft_steps=0)
    assert again.run().reason == "done"
    tries = Counter(
        event.draw for event in ledger(tmp_path)
        if isinstance(event, events.Entered) and event.tries > 1
    )  # fmt: skip
    assert tries == {2: 2, 3: 2, 4: 2, 5: 2}  # draws 0 and 1 were sampled by version 0: reused
    assert again.model.batches == [[0, 1], [2, 3], [4, 5], [6, 7]]
    versions = [event.version for event in ledger(tmp_path) if isinstance(event, events.Published)]
    assert versions == [1, 2, 3, 4, 5, 6]  # new and higher after the resume
    assert again.model.max_age == 0


def test_a_trajectory_of_another_task_is_not_reused_in_a_reopened_group(tmp_path: Path) -> None:
    world = World(tmp_path, sft_steps=0)

    def crash(event: LedgerEvent) -> None:
        if isinstance(event, Trained):
            raise KeyboardInterrupt

    world.on_append = crash
    with pytest.raises(KeyboardInterrupt):
        world.run()

    class Edited(ScriptedTasks):
        async def task(self, drawn: events.Drawn) -> Task:
            made = await super().task(drawn)
            return replace(made, description=Description(objective=f"new {drawn.draw}"))

    again = World(tmp_path, sft_steps=0, tasks=Edited())
    assert again.run().reason == "done"
    assert again.model.prompts[0] == ["new 0", "new 1"]
    entered = [e.tries for e in ledger(tmp_path) if isinstance(e, events.Entered) and e.draw < 2]
    assert sorted(entered) == [1, 1, 1, 1, 2, 2, 2, 2]


def test_a_changed_configuration_is_said_aloud(tmp_path: Path) -> None:
    World(tmp_path, steps=1).run()
    world = World(tmp_path, config="other")
    world.run()
    (warning,) = world.watching.of("warning")
    assert warning["message"] == (
        "The configuration differs from the one of the run's last start in run.name."
    )


def test_a_lost_journal_record_is_made_again(tmp_path: Path) -> None:
    world = World(tmp_path, sft_steps=0)

    def crash(event: LedgerEvent) -> None:
        if isinstance(event, Trained):
            raise KeyboardInterrupt

    world.on_append = crash
    with pytest.raises(KeyboardInterrupt):
        world.run()
    for path in (tmp_path / "journal").iterdir():
        path.unlink()
    again = World(tmp_path, sft_steps=0)
    assert again.run().reason == "done"
    assert again.model.batches[0] == [0, 1]
    assert exact(tmp_path).pending == 0


def test_a_step_that_changes_no_weight_still_accounts_for_its_attempts(tmp_path: Path) -> None:
    world = World(tmp_path, sft_steps=0)

    async def nothing(groups: Any, *, version: int) -> StepReport:
        world.model.batches.append([group.draw for group in groups])
        return StepReport(step=1, loss=None, skipped="no group has two different rewards")

    world.model.rl_step = nothing  # type: ignore[method-assign]
    assert world.run().reason == "done"
    assert world.model.version == 0
    assert exact(tmp_path).trained == 16
