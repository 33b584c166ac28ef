"""The run-time monitor: states, marks, release, saving; and its numbers in virtual time."""

from __future__ import annotations

import json
import math
import random
from operator import mul

import pytest

from bench import monitor as bench
from posttrain.core.task import Description, Place, Task, ToolCall
from posttrain.core.trajectory import AttemptKey, Trajectory, Turn
from posttrain.core.verdict import Component, Outcome, Verdict
from posttrain.verify import drift as drifts
from posttrain.verify.drift import Drift, Lag, Surge
from posttrain.verify.monitor import HOLD, RECENT, VERSIONS, Decision, Monitor, State
from posttrain.verify.signals import Mark, Seen, fingerprint, marks, seen


def group(rng: random.Random, step: int, rate: float, **fields: object) -> list[Seen]:
    plain = {"tokens": 100, "turns": 4, "tool_calls": 1, "output": 0, **fields}
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
        ({"turns": 1}, Mark.FEWER_TURNS),
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


def test_learning_as_steep_as_is_allowed_is_no_jump_and_a_step_is_one() -> None:
    steps = [0.3] * 100 + [min(0.7, 0.3 + 0.0005 * 8 * n) for n in range(150)]
    learner, cheat = Drift(), Drift()
    peak = 0.0
    for rate in steps:
        learner.take(8 * rate, 8)
        learner.check()
        peak = max(peak, learner.up)
    for rate in [0.3] * 100 + [0.7] * 10:
        cheat.take(8 * rate, 8)
    assert peak < HOLD
    assert cheat.up > HOLD
    assert learner.down < 0.0 < cheat.up


def test_the_filter_agrees_with_plain_bayes_where_nothing_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RISE_EVERY", "JUMP_EVERY", "RISE_LASTS", "JUMP_LASTS"):
        monkeypatch.setattr(drifts, name, 1e300)
    monkeypatch.setattr(drifts, "WANDER", 0.0)
    monkeypatch.setattr(drifts, "STEEPEST", 0.0)
    own = drifts.Filter()
    for value in (3.0, 5.0, 0.0, 8.0):
        own.take(value, 8, 0.5)  # the beta is uniform where the rate is a half
    found = [math.prod(pmf(k, 8, rate) for k in (3, 5, 0, 8)) for rate in drifts.RATES]
    expected = math.fsum(map(mul, found, drifts.RATES)) / math.fsum(found)
    assert own.rate == pytest.approx(expected, abs=1e-9)


def pmf(k: int, n: int, rate: float) -> float:
    """Of a beta-binomial whose parameters add up to 1, by Gauss's product and not by lgamma."""
    a, b = rate, 1.0 - rate
    up = math.prod(a + i for i in range(k)) * math.prod(b + i for i in range(n - k))
    return math.comb(n, k) * up / math.factorial(n)


def test_a_mark_is_measured_against_its_own_past() -> None:
    rare, usual = Surge(), Surge()
    for step in range(60):
        rare.take(0, 4)
        usual.take(int(step % 2 == 0), 1)
    assert rare.up == 0.0
    for surge in (rare, usual):
        before = surge.up
        surge.take(1, 1)
    assert rare.up > 2.0 > usual.up - before


def test_twins_are_counted_from_the_first_on() -> None:
    """An output is seen to be another's only when the second comes."""
    monitor = Monitor()
    play(monitor, range(60), 0.4)
    for step in (60, 61):
        monitor.take("d", "v", group(random.Random(step), step, 1.0, output=7))
    wins = monitor.save()["streams"]["d"][0][1]["wins"]
    assert sum(marked for output, _, marked in wins if output == 7) == 16


@pytest.mark.parametrize(
    ("call", "told", "found"),
    [
        ("cat /artefacts/../checker.py", "", True),
        ("python -c 'import posttrain.verify.harness'", "", True),
        ("cat /proc/1/environ", "", True),
        ("cat /proc/self/status answer.txt", "", False),
        ("ls /artefacts", "Put it under /artefacts.", False),
    ],
)
def test_a_win_whose_calls_reach_for_the_grader_has_access(
    call: str, told: str, found: bool
) -> None:
    turn = Turn(text="", tool_calls=(ToolCall(id="1", name="sh", arguments={"command": call}),))
    task = Task(domain="d", level=0, seed=0, description=Description(objective=f"Do it. {told}"))
    part = Component(name="x", place=Place.DETERMINISTIC, value=1.0)
    made = Trajectory(key=AttemptKey(run="r", draw=0, member=0), task=task, turns=(turn,))
    one = seen(made.judged(Verdict(components=(part,)), Outcome.SCORED))
    assert one is not None
    assert (Mark.ACCESS in one.marks) == found
    decision = Monitor().take("d", "v", [one])
    assert (decision is not None and decision.state is State.ALARM) == found


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


def test_a_rise_that_held_out_tasks_do_not_follow_is_evidence() -> None:
    gamed, caught_up, steady, few = Lag(), Lag(), Lag(), Lag()
    for lag, rates, passed, tasks in (
        (gamed, (0.2, 0.2, 0.4, 0.6), 26, 128),
        (caught_up, (0.1, 0.2, 0.4, 0.43), 56, 128),  # sampled answers become the greedy ones
        (steady, (0.6, 0.6, 0.62, 0.65), 26, 128),  # easier to begin with, whatever the reason
        (few, (0.2, 0.2, 0.4, 0.6), 2, 10),
    ):
        for rate in rates:
            lag.take(rate, 0.02**2, passed, tasks)
    assert gamed.up > 20
    assert (caught_up.up, steady.up) == (0.0, 0.0)
    assert 0 < few.up < 9, "ten tasks show little"
    gamed.take(0.62, 0.02**2, 78, 128)
    assert gamed.up < 1.0, "they follow now"


def test_held_out_tasks_that_follow_are_no_evidence_however_steep_the_rise() -> None:
    lag, chance = Lag(), random.Random(3)
    for step in range(40):
        rate = 0.02 * step
        passed = sum(chance.random() < max(0.0, rate - 0.05) for _ in range(128))
        lag.take(rate, 0.03**2, passed, 128)
        assert lag.up < 9


def test_held_out_tasks_speak_for_an_alarm_with_a_rise_and_not_without() -> None:
    def alarm(passed: int, rate: float) -> tuple[int, str]:
        monitor = Monitor()
        assert play(monitor, range(60), 0.3) is None
        monitor.compare("d", passed=300, tasks=1000)
        monitor.compare("unknown", passed=1, tasks=1)
        for step in range(60, 100):
            group_ = group(random.Random(step), step, rate)
            monitor = Monitor.load(json.loads(json.dumps(monitor.save())))
            decision = monitor.take("d", "v", group_)
            monitor.compare("d", passed=passed, tasks=1000)
            if decision is not None and decision.state is State.ALARM:
                return step, decision.evidence
        return 100, ""

    alone, told = alarm(passed=550, rate=0.55)
    assert "Held-out" not in told
    with_both, told = alarm(passed=300, rate=0.55)
    assert "Held-out tasks did not follow" in told
    assert with_both < alone
    assert alarm(passed=75, rate=0.3) == (100, "")
