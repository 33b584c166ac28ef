"""The run-time monitor: states, marks, release, saving; and its numbers in virtual time."""

from __future__ import annotations

import json
import random

import pytest

from bench import monitor as bench
from posttrain.core.task import Place
from posttrain.core.verdict import Component
from posttrain.verify.drift import MAX_RATE, Drift
from posttrain.verify.monitor import HOLD, RECENT, VERSIONS, Decision, Monitor, State
from posttrain.verify.signals import Mark, Seen, fingerprint, marks


def group(rng: random.Random, step: int, rate: float, **fields: object) -> list[Seen]:
    plain = {"tokens": 100, "tool_calls": 1, "output": 0, **fields}
    return [
        Seen(key=f"{step}.{i}", task=str(step), reward=float(rng.random() < rate), **plain)  # type: ignore[arg-type]
        for i in range(8)
    ]


def play(monitor: Monitor, steps: range, rate: float, **fields: object) -> Decision | None:
    """The alarm that comes, or None."""
    for step in steps:
        given = group(random.Random(step), step, rate, **fields)
        decision = monitor.take("d", "v", given)
        monitor.check()
        if decision is not None and decision.state is State.ALARM:
            return decision
    return None


def test_a_jump_of_the_pass_rate_alone_is_held_with_its_evidence() -> None:
    monitor = Monitor()
    assert play(monitor, range(60), 0.2) is None
    alarm = play(monitor, range(60, 90), 0.7)
    assert alarm is not None
    assert "for a jump up" in alarm.evidence
    assert alarm.accepts
    assert alarm.rejects
    assert monitor.stats().states == {"d": State.ALARM}


def test_a_fall_is_watched_and_never_held() -> None:
    monitor = Monitor()
    assert play(monitor, range(60), 0.8) is None
    assert play(monitor, range(60, 75), 0.1) is None
    assert monitor.stats().states == {"d": State.WATCH}
    assert play(monitor, range(75, 400), 0.1) is None
    assert monitor.stats().states == {}, "the low rate is the new normal"


@pytest.mark.parametrize(
    ("fields", "mark"),
    [
        ({"output": 7}, Mark.ALIKE),
        ({"tool_calls": 0}, Mark.NO_TOOLS),
        ({"tokens": 10}, Mark.SHORTER),
        ({"marks": frozenset({Mark.HIDDEN})}, Mark.HIDDEN),
        ({"marks": frozenset({Mark.JUDGE})}, Mark.JUDGE),
    ],
)
def test_a_mark_that_becomes_frequent_alarms_with_a_rise_and_not_without(
    fields: dict[str, object], mark: Mark
) -> None:
    rising, steady = Monitor(), Monitor()
    for monitor in (rising, steady):
        assert play(monitor, range(80), 0.4) is None
    alarm = play(rising, range(80, 100), 0.7, **fields)
    assert alarm is not None
    assert str(mark) in alarm.evidence
    assert play(steady, range(80, 84), 0.3, **fields) is None


def test_access_to_the_verifier_alarms_at_once() -> None:
    alarm = play(Monitor(), range(3), 0.9, marks=frozenset({Mark.ACCESS}))
    assert alarm is not None
    assert str(Mark.ACCESS) in alarm.evidence


def test_a_release_makes_what_is_seen_the_reference_and_a_quarantine_stays() -> None:
    monitor = Monitor()
    play(monitor, range(60), 0.2)
    assert play(monitor, range(60, 90), 0.7) is not None
    monitor.quarantine("d")
    assert monitor.stats().states == {"d": State.QUARANTINED}
    assert play(monitor, range(90, 95), 0.7) is None
    assert monitor.stats().states == {"d": State.QUARANTINED}
    monitor.release("d")
    assert play(monitor, range(95, 200), 0.7) is None
    assert monitor.stats().states == {}


def test_a_new_verifier_version_starts_afresh_and_old_ones_are_forgotten() -> None:
    monitor = Monitor()
    play(monitor, range(60), 0.2)
    for step in range(60, 160):
        assert monitor.take("d", "v2", group(random.Random(step), step, 0.8)) is None
    for version in range(20):
        monitor.take("d", f"v{version}", group(random.Random(version), version, 0.5))
    assert monitor.stats().streams == VERSIONS


def test_what_is_saved_goes_on_as_if_nothing_had_been() -> None:
    one = Monitor()
    play(one, range(70), 0.3)
    other = Monitor.load(json.loads(json.dumps(one.save())))
    told = [play(monitor, range(70, 120), 0.7) for monitor in (one, other)]
    assert told[0] is not None
    assert told[0] == told[1]
    assert other.save() == one.save()


def test_memory_does_not_grow_with_verdicts() -> None:
    monitor = Monitor()
    sizes = []
    for start in (0, 400):
        play(monitor, range(start, start + 400), 0.5, output=9)
        sizes.append(len(json.dumps(monitor.save())))
    assert sizes[1] < 1.1 * sizes[0]
    assert len(monitor.save()["streams"]["d"][0][1]["wins"]) == RECENT


def test_the_reference_follows_learning_and_not_a_jump() -> None:
    drift = Drift()
    for _ in range(50):
        drift.take(1.0, 8)
    before = drift.levels[0].rate
    for _ in range(10):
        drift.take(8.0, 8)
    assert drift.levels[0].rate - before <= 80 * MAX_RATE + 1e-9
    assert drift.up > 10


def test_marks_need_a_check_that_paid() -> None:
    failing = Component(name="x", place=Place.DETERMINISTIC, value=0.0)
    assert marks((failing, failing)) == frozenset()
    judged = Component(name="judge", place=Place.JUDGE, value=0.0)
    passing = Component(name="y", place=Place.DETERMINISTIC, value=1.0)
    assert marks((passing, judged)) == {Mark.JUDGE}
    assert fingerprint("  ") == 0


def test_honest_learners_are_left_alone_in_virtual_time() -> None:
    peaks = bench.honest(0, domains=36, steps=300)
    assert sum(peak >= HOLD for peak in peaks) <= 1
    assert max(peaks) > 1.0, "the domains give the monitor something to doubt"


def test_gamed_domains_are_found_in_virtual_time() -> None:
    runs = [bench.gamed(seed, likeness=0.0, second=True) for seed in range(60)]
    found = [bench.delay(run, HOLD) for run in runs]
    assert sum(delay is not None and delay <= 150 for delay in found) >= 48
