"""The hold list: a policy that learns to game one domain loses it, and the others go on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import main
from posttrain.core import events, seeds
from posttrain.core.clock import ManualClock
from posttrain.core.ports import AttemptRequest
from posttrain.core.task import Check, Description, Place, Task
from posttrain.core.trajectory import AttemptKey, Trajectory, Turn
from posttrain.core.verdict import Component, Outcome, Verdict
from posttrain.loop.book import Book
from posttrain.loop.parts import Records
from posttrain.loop.past import RELEASE, Past, fold
from posttrain.loop.watch import Watch
from posttrain.observe.journal import FileJournal
from posttrain.observe.ledger import FileLedger
from posttrain.verify import stack
from tests.loop.scripted_run import RUN, ScriptedGroups, ScriptedSource, Watching, World

EXPLOIT = "import grader; grader.passed = lambda *_: True  # run {}"


@dataclass
class LearnsToCheat(ScriptedGroups):
    """Solves a third of all tasks; from weights `cheats_from` on, `b`'s planted weak verifier pays
    an exploit that three of four attempts there use.
    """

    cheats_from: int = 40

    def made(self, request: AttemptRequest, weights: str, version: int) -> Trajectory:
        made = super().made(request, weights, version)
        luck = seeds.hashed("luck", request.key.draw, request.key.member) % 12
        cheats = request.task.domain == "b" and version >= self.cheats_from and luck < 9
        text = EXPLOIT.format(luck) if cheats else made.final_text
        value = 1.0 if cheats or luck % 3 == 0 else 0.0
        assert made.verdict is not None
        part: Component = replace(made.verdict.components[0], value=value)
        made = replace(made, turns=(Turn(text=text, num_sampled_tokens=20),))
        return made.judged(Verdict(components=(part,)), Outcome.SCORED)


def cheating(folder: Path, **fields: Any) -> World:
    world = World(
        folder, sft_steps=0, size=8, points=frozenset(), source=ScriptedSource(("a", "b")),
        **{"steps": 80, "save_every": 10, **fields},
    )  # fmt: skip
    world.policy = LearnsToCheat(world.model)
    return world


def written(folder: Path) -> Sequence[events.LedgerEvent]:
    with FileLedger(folder / "ledger.jsonl") as ledger:
        return list(ledger.events())


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_domain_that_is_gamed_is_held_and_the_others_go_on(
    tmp_path: Path, staleness: int
) -> None:
    world = cheating(tmp_path, staleness=staleness)
    assert world.run().reason == "done"
    (held,) = world.watching.of("hold")
    assert held["domain"] == "b"
    assert "near-identical" in str(held["evidence"])
    told = [str(one["message"]) for one in world.watching.of("warning")]
    assert any("Domain b is held out of training until it is released" in one for one in told)
    (alarm,) = [one for one in world.watching.of("monitor") if one["state"] == "alarm"]
    assert alarm["accepts"]
    assert alarm["rejects"]
    log = written(tmp_path)
    past = fold(log)
    stats = past.account.stats()
    assert stats.trained == 80 * 2 * 8
    assert stats.dropped["held"] >= 8
    assert stats.entered == stats.trained + sum(stats.dropped.values()) + stats.pending
    at = next(i for i, one in enumerate(log) if isinstance(one, events.Controlled))
    assert {one.domain for one in log[at:] if isinstance(one, events.Drawn)} == {"a"}
    paid = [one for one in log[:at] if isinstance(one, events.Finished) and one.reward == 1.0]
    assert len(paid) > 100
    after = {key for one in log[at:] if isinstance(one, events.Trained) for key in one.keys}
    domains = {past.draws[past.account.attempt(key).draw].domain for key in after}  # type: ignore[union-attr]
    assert domains <= ({"a"} if staleness == 0 else {"a", "b"})  # a batch may be in its step


def test_a_hold_outlives_a_resume_and_a_release_ends_it(tmp_path: Path) -> None:
    assert cheating(tmp_path).run().reason == "done"
    again = cheating(tmp_path, steps=84)
    assert again.run().reason == "done"
    assert not again.watching.of("hold")
    before = len(written(tmp_path))
    with FileLedger(tmp_path / "ledger.jsonl") as ledger:
        list(ledger.events())
        arguments = {"domain": "b", "reason": "people saw 8 accepts: all are right"}
        ledger.append(events.Controlled(action=RELEASE, arguments=arguments))
    released = cheating(tmp_path, steps=104)
    assert released.run().reason == "done"
    assert not released.watching.of("hold"), "what was released is the new reference"
    drawn = [one.domain for one in written(tmp_path)[before:] if isinstance(one, events.Drawn)]
    assert "b" in drawn


def test_what_the_monitor_has_learned_outlives_a_resume(tmp_path: Path) -> None:
    assert cheating(tmp_path, steps=40).run().reason == "done"  # honest so far
    again = cheating(tmp_path, steps=60)
    assert again.run().reason == "done"
    (held,) = again.watching.of("hold")
    assert held["domain"] == "b"


def test_without_holding_an_alarm_is_a_warning(tmp_path: Path) -> None:
    world = cheating(tmp_path, hold_alarms=False)
    assert world.run().reason == "done"
    assert not world.watching.of("hold")
    told = [str(one["message"]) for one in world.watching.of("warning")]
    assert any("Alarm for domain b (it is trained on all the same" in one for one in told)
    assert "held" not in fold(written(tmp_path)).account.stats().dropped


def test_a_held_domain_is_released_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POSTTRAIN_RUNS", str(tmp_path))
    assert cheating(tmp_path / "own").run().reason == "done"
    assert main.run(["release", "own", "a", "--reason", "fine"]) == 2
    assert "'a' is not held (held: b)" in capsys.readouterr().err
    assert main.run(["release", "own", "b", "--reason", "all are right"]) == 0
    assert "next:  posttrain train --resume own" in capsys.readouterr().out
    assert fold(written(tmp_path / "own")).held == {}
    assert main.run(["release", "own", "b", "--reason", "again"]) == 2


def test_people_quarantine_a_domain_and_release_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POSTTRAIN_RUNS", str(tmp_path))
    assert cheating(tmp_path / "own", steps=10).run().reason == "done"
    assert main.run(["quarantine", "own", "c", "--reason", "no"]) == 2
    assert "no attempt is of 'c'" in capsys.readouterr().err
    assert main.run(["quarantine", "own", "a", "--reason", "its answers leaked"]) == 0
    before = len(written(tmp_path / "own"))
    again = cheating(tmp_path / "own", steps=20)
    assert again.run().reason == "done"
    log = written(tmp_path / "own")
    assert fold(log).quarantined == {"a": "taken out by people: its answers leaked"}
    assert {one.domain for one in log[before:] if isinstance(one, events.Drawn)} == {"b"}
    assert main.run(["release", "own", "a", "--reason", "they were others'"]) == 0
    before = len(log)
    assert cheating(tmp_path / "own", steps=30).run().reason == "done"
    drawn = [
        one.domain for one in written(tmp_path / "own")[before:] if isinstance(one, events.Drawn)
    ]
    assert "a" in drawn


def test_other_judging_code_is_another_verifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(domain="a", level=0, seed=0, description=Description(objective="o"),
                checks=(Check(kind="exact"),))  # fmt: skip
    assert re.fullmatch(r"exact@1\+[0-9a-f]{8}", stack.version(task))
    before = stack.version(task)
    monkeypatch.setattr(stack, "fingerprint", lambda module: "0badc0de")
    assert stack.version(task) == "exact@1+0badc0de" != before


def test_a_group_that_a_resume_ends_again_is_counted_once(tmp_path: Path) -> None:
    """It was finished, and pending, when the checkpoint was written."""
    with FileLedger(tmp_path / "ledger.jsonl") as ledger:
        journal = FileJournal(tmp_path / "journal")
        records = Records(ledger=ledger, journal=journal, recorder=Watching(), clock=ManualClock())
        book = Book(records, Past(run=RUN))
        book.write(events.Drawn(draw=0, domain="a", level=0, seed=0, size=2, phase="rl"))
        members = [judged(member) for member in range(2)]
        for member in members:
            book.entered(member.key)
            book.finished(member)
        drawn = book.past.draws[0]
        watch = Watch(book)
        watch.take(drawn, members)
        saved = json.loads(json.dumps(watch.save()))
        assert saved["counted"] == [0]
        again = Watch(book, saved)
        again.take(drawn, members)
        assert again.save() == saved
        book.dropped([member.key.hex for member in members], "stale")
        assert again.save()["counted"] == []
        journal.close()


def judged(member: int) -> Trajectory:
    key = AttemptKey(run=RUN, draw=0, member=member)
    task = Task(domain="a", level=0, seed=0, description=Description(objective="o"))
    part = Component(name="exact", place=Place.DETERMINISTIC, value=float(member))
    made = Trajectory(key=key, task=task, turns=(Turn(text=str(member), num_sampled_tokens=1),))
    return made.judged(Verdict(components=(part,)), Outcome.SCORED)


def test_held_out_tasks_are_held_against_what_is_passed_in_training(tmp_path: Path) -> None:
    world = cheating(
        tmp_path, steps=30, evaluate_every=10, held_out={"a": 90, "b": 20}, hold_alarms=False
    )
    assert world.run().reason == "done"
    path = max((tmp_path / "checkpoints").glob("*/state.json"))
    streams = json.loads(path.read_text())["extra"]["watch"]["monitor"]["streams"]
    lags = {domain: versions[-1][1]["lag"] for domain, versions in streams.items()}
    assert lags["a"]["gap"] == 0.0
    assert lags["b"]["trained"] == pytest.approx(1 / 3, abs=0.1)
    assert lags["b"]["gap"] == pytest.approx(lags["b"]["trained"] - 21 / 102)
    assert lags["b"]["up"] == 0.0, "it passed as much more from the beginning"
