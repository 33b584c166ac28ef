"""Judging again by the hidden inputs of then."""

import asyncio
from dataclasses import replace

from posttrain.core.task import Check, Place
from posttrain.core.verdict import Component, Outcome, Verdict
from posttrain.verify.code import differential
from posttrain.verify.kinds import Subject, hidden_seeds
from posttrain.verify.recorded import recorded_seeds, seed_of

WRONG = "def shifted(n):\n    return n + 2 if n == 77 else n + 1\n"
CHECK = Check(
    kind="differential",
    params={
        "generator": "def generate(rng): return (rng.randrange(100),)\n",
        "reference": "def shifted(n):\n    return n + 1\n",
        "function": "shifted",
        "count": 8,
    },
)


def judged(attempt, finding):
    part = Component(
        name="differential", place=Place.DETERMINISTIC, value=finding.value,
        evidence=finding.evidence,
    )  # fmt: skip
    return attempt.judged(Verdict(components=(part,)), Outcome.SCORED)


def test_the_same_attempt_meets_the_same_hidden_inputs_again(make_attempt, tools):
    """A wrong program passes most draws: a new draw would flip it, and blame the verifier."""
    attempt = make_attempt(f"```python\n{WRONG}```\n", checks=(CHECK,), artefacts=())
    seeds = iter(range(1000))

    def verify(attempt, **more):
        subject = Subject(trajectory=attempt)
        return asyncio.run(differential(CHECK, subject, replace(tools, **more)))

    drawn = lambda _: next(seeds)  # noqa: E731
    first = verify(attempt, seeds=drawn)
    while first.value != 0.0:  # the one draw in a dozen that meets it
        first = verify(attempt, seeds=drawn)
    seed = first.evidence["evidence"]["seed"]
    again = verify(judged(attempt, first), seeds=recorded_seeds(drawn))
    assert again.value == 0.0
    assert again.evidence == first.evidence
    assert next(seeds) == seed + 1, "nothing was drawn"


def test_without_a_record_a_new_seed_is_drawn(make_attempt):
    attempt = make_attempt("x")
    fresh = hidden_seeds()
    assert recorded_seeds(fresh)(attempt) == fresh(attempt)
    for evidence in ({}, {"evidence": {}}, {"evidence": "none"}, {"evidence": {"seed": True}}):
        part = Component(name="x", place=Place.RULE, value=1.0, evidence=evidence)
        verdict = Verdict(components=(part,))
        assert seed_of(verdict) is None
        assert recorded_seeds(fresh)(attempt.judged(verdict, Outcome.SCORED)) == fresh(attempt)
