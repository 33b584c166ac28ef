"""Judging again and going back: nothing overwritten, nothing lost, the correction trained."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from posttrain.core import events
from posttrain.core.clock import ManualClock
from posttrain.core.containment import Sealed
from posttrain.core.errors import UsageError
from posttrain.core.ports import StepReport
from posttrain.core.task import Check, Environment, Place
from posttrain.core.trajectory import AttemptKey, Group, Trajectory
from posttrain.core.verdict import Component, Verdict
from posttrain.loop.book import Book
from posttrain.loop.parts import Records
from posttrain.loop.past import fold
from posttrain.loop.reverify import Reverification, Reverifier, Standing
from posttrain.loop.rollback import roll_back
from posttrain.observe.journal import FileJournal
from posttrain.observe.kept import KeptWorkspaces, archive_of
from posttrain.observe.ledger import FileLedger, read_events
from posttrain.rollout.group import WORKSPACE
from posttrain.schedule.account import Status
from tests.loop.scripted_run import ScriptedModel, ScriptedTasks, Watching, World


@dataclass
class Rule:
    """A verifier that pays for tokens which leave this remainder."""

    remainder: int
    seen: list[tuple[Trajectory, Sealed | None]] = field(default_factory=list)

    async def verify(self, trajectory: Trajectory, sealed: Sealed | None) -> Verdict:
        self.seen.append((trajectory, sealed))
        oracle = trajectory.rows[0].versions_T[-1] == -1
        value = 1.0 if oracle else float(int(trajectory.final_text) % 2 == self.remainder)
        part = Component(name="exact", place=Place.DETERMINISTIC, value=value, verifier="exact@2")
        return Verdict(components=(part,))


def judged_again(
    directory: Path, verifier: Rule, *, domains: Sequence[str] = (), tasks=None, corrections=None,
    read=None,
):  # fmt: skip
    @asynccontextmanager
    async def restore(sha256: str, environment: Environment):
        yield read(sha256)

    async def body() -> Reverification:
        with FileLedger(directory / "ledger.jsonl") as ledger:
            journal = FileJournal(directory / "journal")
            records = Records(
                ledger=ledger, journal=journal, recorder=Watching(), clock=ManualClock()
            )
            book = Book(records, fold(ledger.events()))
            reverifier = Reverifier(
                book,
                verifier=verifier,
                tasks=tasks or ScriptedTasks(),
                restore=restore,
                corrections=corrections,
            )
            try:
                return await reverifier.run(domains=domains)
            finally:
                journal.close()

    return asyncio.run(body())


class Remembering(ScriptedModel):
    """A model that remembers what it was trained on."""

    rewards: dict[str, float | None]

    async def rl_step(self, groups: Sequence[Group], *, version: int) -> StepReport:
        for group in groups:
            for member in group.members:
                self.rewards[member.key.hex] = member.reward
        return await super().rl_step(groups, version=version)


def start(directory: Path, **more) -> tuple[World, dict[str, float | None]]:
    world = World(directory, steps=4, save_every=1, **more)
    world.model.__class__ = Remembering
    world.model.rewards = {}
    world.run()
    return world, world.model.rewards


def test_the_same_verifier_changes_nothing(tmp_path: Path) -> None:
    start(tmp_path)
    found = judged_again(tmp_path, Rule(remainder=1))
    assert len(found.changes) == 2 + 4 * 4  # examples of one step, members of four
    assert not any(change.changed for change in found.changes)
    assert found.affected_steps() == {}


def test_another_verifier_flips_and_names_the_steps_it_trained(tmp_path: Path) -> None:
    start(tmp_path)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    found = judged_again(tmp_path, Rule(remainder=0))
    flips = [change for change in found.changes if change.flipped]
    assert len(flips) == 16  # every sampled attempt; the oracles stay right
    assert found.affected_steps() == {2: 4, 3: 4, 4: 4, 5: 4}
    table = found.table()
    assert sum(c[Standing.PASS, Standing.FAIL] + c[Standing.FAIL, Standing.PASS]
               for c in table.values()) == 16  # fmt: skip
    after = (tmp_path / "ledger.jsonl").read_bytes()
    assert after.startswith(before)
    added = [e for e in read_events(tmp_path / "ledger.jsonl") if isinstance(e, events.Reverified)]
    assert len(added) == 18
    assert {event.verifier for event in added} == {"exact@2"}
    again = judged_again(tmp_path, Rule(remainder=0))
    assert not any(change.changed for change in again.changes), "compared with the newest verdict"


def test_only_the_named_domains_are_judged(tmp_path: Path) -> None:
    start(tmp_path)
    found = judged_again(tmp_path, Rule(remainder=0), domains=["b"])
    assert set(found.table()) == {"b"}


def test_the_checks_of_today_are_used_where_the_task_is_the_same(tmp_path: Path) -> None:
    @dataclass
    class Changed(ScriptedTasks):
        objective: str = ""

        async def task(self, drawn: events.Drawn):
            task = await super().task(drawn)
            shown = replace(
                task.description, objective=self.objective or task.description.objective
            )
            return replace(task, description=shown, checks=(Check(kind="exact", version=2),))

    start(tmp_path)
    rule = Rule(remainder=1)
    found = judged_again(tmp_path, rule, tasks=Changed())
    assert {seen.task.checks[0].version for seen, _ in rule.seen} == {2}
    assert not found.remarks
    rule = Rule(remainder=1)
    found = judged_again(tmp_path, rule, tasks=Changed(objective="another question"))
    assert {seen.task.checks[0].version for seen, _ in rule.seen} == {1}
    assert found.remarks == {
        "judged by the checks of then: its domain makes another task now": len(found.changes)
    }
    found = judged_again(tmp_path, Rule(remainder=1), tasks=ScriptedTasks(frozenset("abc")))
    assert found.remarks.total() == len(found.changes)


def test_what_an_attempt_left_must_be_there(tmp_path: Path) -> None:
    class Boxed(ScriptedTasks):
        async def task(self, drawn: events.Drawn):
            return replace(await super().task(drawn), environment=Environment())

    start(tmp_path, tasks=Boxed())
    rule = Rule(remainder=0)
    found = judged_again(tmp_path, rule, tasks=Boxed())
    assert not found.changes
    assert not rule.seen
    assert found.left_out == {"what it left is not there: 'it was not kept'": 18}
    assert WORKSPACE.startswith("."), "no artefact of a task takes its name"


def test_a_workspace_that_was_let_go_is_told_apart_from_a_lost_one(tmp_path, monkeypatch) -> None:
    class Boxed(ScriptedTasks):
        async def task(self, drawn: events.Drawn):
            return replace(await super().task(drawn), environment=Environment())

    gone = KeptWorkspaces(tmp_path, max_bytes=1).put(b"large", domain="a", key="ab")
    recall = Book.recall

    def recalled(book: Book, key: AttemptKey) -> Trajectory:
        left = {WORKSPACE: {"sha256": gone if key.member else "0" * 64}}
        return replace(recall(book, key), artefacts=left)

    start(tmp_path, tasks=Boxed())
    monkeypatch.setattr(Book, "recall", recalled)
    found = judged_again(tmp_path, Rule(remainder=0), tasks=Boxed(), read=archive_of(tmp_path))
    told = "its workspace: it was let go, to stay within run.workspaces_mib"
    assert found.left_out[told] == 8
    assert found.left_out.total() == 18
    assert sum("no blob" in reason for reason in found.left_out) == 1


def test_what_people_said_counts_before_any_verifier(tmp_path: Path) -> None:
    _, rewards = start(tmp_path)
    right, wrong = (next(k for k, r in rewards.items() if r == value) for value in (1.0, 0.0))
    broken, old = [k for k in rewards if k not in (right, wrong)][:2]
    said = {
        key: events.Relabelled(key=key, reward=reward, reason="seen", place=place)
        for key, reward, place in (
            (right, 0.0, ""), (wrong, 1.0, ""), (broken, None, ""), (old, 0.5, "of another try"),
        )
    }  # fmt: skip
    rule = Rule(remainder=1)
    found = judged_again(tmp_path, rule, corrections=said)
    assert {seen.key.hex for seen, _ in rule.seen}.isdisjoint({right, wrong, broken})
    assert old in {seen.key.hex for seen, _ in rule.seen}, "it was made again since"
    after = {change.key: change.after for change in found.changes if change.changed}
    assert after == {right: 0.0, wrong: 1.0, broken: None}
    assert found.remarks == {"judged by people": 3}


def test_lost_records_are_counted(tmp_path: Path) -> None:
    start(tmp_path)
    for segment in (tmp_path / "journal").iterdir():
        segment.write_bytes(b"")
    found = judged_again(tmp_path, Rule(remainder=0))
    assert found.left_out == {"its record in the journal is lost": 18}


def test_a_rolled_back_run_trains_the_corrected_rewards(tmp_path: Path) -> None:
    _, rewards = start(tmp_path)
    judged_again(tmp_path, Rule(remainder=0))
    with FileLedger(tmp_path / "ledger.jsonl") as ledger:
        past = fold(ledger.events())
        done = roll_back(tmp_path, ledger, past, to=3, reason="a weak verifier")
        past.account.check()
    assert (done.before, done.step, done.released) == (5, 3, 8)
    assert [path.parent.name for path in done.aside] == ["rolled-back-1"] * 2
    kept = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert kept == {"step-000001", "step-000002", "step-000003"}
    assert fold(read_events(tmp_path / "ledger.jsonl")).account.step == 3

    world, again = start(tmp_path)
    assert world.model.step == 5
    past = fold(read_events(tmp_path / "ledger.jsonl"))
    reused = {key for key in again if past.account.attempt(key).tries == 1 and key in rewards}
    assert reused, "attempts by weights that remain are trained again"
    assert reused <= set(past.reverified)
    assert all(again[key] == 1.0 - (rewards[key] or 0.0) for key in reused)
    past.account.check()
    stats = past.account.stats()
    assert stats.entered == stats.trained + sum(stats.dropped.values()) + stats.pending
    for event in read_events(tmp_path / "ledger.jsonl"):
        if isinstance(event, events.Controlled):
            assert event.arguments == {"from": 5, "to": 3, "reason": "a weak verifier"}


def test_back_to_the_beginning_and_where_one_cannot_go(tmp_path: Path) -> None:
    start(tmp_path)
    with FileLedger(tmp_path / "ledger.jsonl") as ledger:
        past = fold(ledger.events())
        for step in (5, 9):
            with pytest.raises(UsageError, match="cannot go back"):
                roll_back(tmp_path, ledger, past, to=step)
        for step in (1, 2):
            shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:06d}")
        with pytest.raises(UsageError, match=r"at or before step 1 is kept \(there are: 3, 4\)"):
            roll_back(tmp_path, ledger, past, to=1)
        done = roll_back(tmp_path, ledger, past, to=0)
        assert (done.step, done.version, done.released) == (0, 0, 18)
    world, _ = start(tmp_path)
    assert world.model.step == 5


def test_an_attempt_that_is_made_again_has_its_new_verdict(tmp_path: Path) -> None:
    start(tmp_path)
    judged_again(tmp_path, Rule(remainder=0))
    past = fold(read_events(tmp_path / "ledger.jsonl"))
    key = next(k for k, e in past.reverified.items() if past.account.attempt(k).member == 1)
    attempt = past.account.attempt(key)
    past.account._move(attempt, Status.FINISHED)  # as after a rewind
    past.apply(events.Entered(key=key, draw=attempt.draw, member=1, tries=2))
    assert key not in past.reverified
