"""What a run amounts to: paired tests, directions, steps across phases and resumes."""

from __future__ import annotations

import math

import pytest

from posttrain.core.events import Note
from posttrain.evals.summary import Direction, outcomes_of, steps_of


def evaluated(point: str, **domains: str) -> Note:
    """`gcd="110"` says which of three tasks passed, `-` that an attempt was lost."""
    passed = {"1": True, "0": False, "-": None}
    data = {
        name: {
            "results": [
                {"task": f"{name}/{i}", "passed": passed[mark]} for i, mark in enumerate(marks)
            ],
            "constant": 0.5,
        }
        for name, marks in domains.items()
    }
    return Note(kind="eval", data={"point": point, "domains": data})


def stepped(step: int, phase: str, **domains: float | None) -> Note:
    entries = {name: {"reward": reward, "n": 2} for name, reward in domains.items()}
    return Note(kind="step", data={"step": step, "phase": phase, "domains": entries})


def test_each_domain_goes_the_way_the_gate_says() -> None:
    outcomes = outcomes_of(
        [
            evaluated("base", up="0" * 12 + "1" * 3, down="1" * 15, low="0" * 30, flat="01" * 7),
            evaluated("rl", up="1" * 15, down="0" * 15, low="1" * 10 + "0" * 20, flat="01" * 7),
        ]
    )
    found = {change.domain: change.direction for change in outcomes.changes}
    assert found == {
        "up": Direction.IMPROVED,
        "down": Direction.FELL,
        "low": Direction.BELOW_CONSTANT,
        "flat": Direction.UNCHANGED,
    }
    assert outcomes.improved == ("up",)
    assert outcomes.fallen == ("down",)
    assert "1 of 4 trained domains improved" in outcomes.sentence
    assert "1 of 4 evaluated domains fell" in outcomes.sentence


def test_the_last_evaluation_of_a_point_counts() -> None:
    outcomes = outcomes_of([evaluated("base", a="0000"), evaluated("base", a="1111")])
    assert outcomes.changes[0].last.passed == 4


def test_points_of_another_suite_are_named_and_compared_with_nothing() -> None:
    old = evaluated("base", a="0000")
    new = [evaluated("sft", a="0000"), evaluated("rl", a="1111")]
    new = [Note(kind="eval", data={**note.data, "suite": "changed"}) for note in new]
    outcomes = outcomes_of([old, *new])
    assert outcomes.other_suites == ("base",)
    assert outcomes.points == ("sft", "rl")
    assert outcomes.rl_gain == 1.0
    back = outcomes_of([old, *new, evaluated("base", a="1111")])
    assert (back.points, back.other_suites) == (("base",), ("sft", "rl"))


def test_evaluations_within_reinforcement_are_a_course_and_no_result() -> None:
    def at(step: int, point: str, **domains: str) -> Note:
        note = evaluated(point, **domains)
        return Note(kind="eval", data={**note.data, "step": step})

    told = [
        at(0, "base", a="0000", b="11--"),
        at(30, "rl", a="1111", b="10--"),
        at(20, "rl@20", a="1100", b="----"),
        at(10, "rl@10", a="1111", b="0000"),
        at(10, "rl@10", a="1000", b="0000"),  # once more, after a resume
    ]
    outcomes = outcomes_of(told)
    assert outcomes.points == ("base", "rl")
    assert [reading.step for reading in outcomes.course] == [0, 10, 20, 30]
    assert [reading.rates.get("a") for reading in outcomes.course] == [0.0, 0.25, 0.5, 1.0]
    assert [reading.rates.get("b") for reading in outcomes.course] == [1.0, 0.0, None, 0.5]
    assert [reading.scored.get("b") for reading in outcomes.course] == [2, 4, None, 2]


def test_lost_attempts_are_not_failed_ones() -> None:
    (change,) = outcomes_of([evaluated("base", a="11--")]).changes
    assert (change.last.rate, change.last.scored, change.last.lost) == (1.0, 2, 2)


def test_rl_is_compared_with_what_it_started_from_over_trained_domains() -> None:
    points = [
        evaluated("rl", a="1" * 9 + "0", watched="0" * 10),
        evaluated("base", a="0" * 10, watched="1" * 10),
        evaluated("sft", a="1" * 4 + "0" * 6, watched="1" * 10),
    ]
    outcomes = outcomes_of(points, watch=["watched"])
    assert outcomes.points == ("base", "sft", "rl")
    assert outcomes.rl_gain == pytest.approx(0.5)
    assert outcomes.rl_gain_p == 2 / 2**5
    assert [change.watch for change in outcomes.changes] == [False, True]
    assert "of 1 trained domain improved" in outcomes.sentence


def test_a_run_with_no_or_one_evaluation_claims_nothing() -> None:
    assert "not been evaluated" in outcomes_of([]).sentence
    once = outcomes_of([evaluated("base", a="1")])
    assert once.changes[0].direction is Direction.UNKNOWN
    assert "nothing to compare" in once.sentence


def test_a_run_whose_trained_domains_could_not_be_evaluated_says_so() -> None:
    points = [evaluated(point, other="1") for point in ("base", "rl")]
    said = outcomes_of(points, watch=["other"]).sentence
    assert said.startswith("None of the trained domains was evaluated")


def test_a_step_made_again_after_a_resume_counts_once() -> None:
    steps = steps_of([stepped(1, "rl", a=0.1), stepped(2, "rl", a=0.2), stepped(2, "rl", a=0.9)])
    assert [(step.x, step.reward) for step in steps] == [(1, 0.1), (2, 0.9)]


def test_phases_that_both_count_from_one_do_not_overlap() -> None:
    steps = steps_of([stepped(1, "sft"), stepped(2, "sft"), stepped(1, "rl"), stepped(2, "rl")])
    assert [step.x for step in steps] == [1, 2, 3, 4]
    running = steps_of([stepped(1, "sft"), stepped(2, "rl")])
    assert [step.x for step in running] == [1, 2]


def test_a_domain_without_reward_is_left_out_never_zero() -> None:
    (step,) = steps_of([stepped(1, "rl", a=None, b=0.5)])
    assert step.reward == 0.5
    assert steps_of([stepped(1, "rl", a=None)])[0].reward is None


def test_metrics_that_are_not_finite_stay_what_they_are() -> None:
    note = Note(kind="step", data={"step": 1, "metrics": {"loss": math.nan, "norm": math.inf}})
    (step,) = steps_of([note])
    assert math.isnan(step.metrics["loss"])
    assert step.metrics["norm"] == math.inf
