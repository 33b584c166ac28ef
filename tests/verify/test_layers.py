import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.task import Check, Place
from posttrain.core.verdict import Component
from posttrain.verify import layers
from posttrain.verify.layers import Finding


def done(check, value, *, error=None):
    return Component(name=check.kind, place=check.place, value=value, gate=check.gate,
                     weight=check.weight, error=error)  # fmt: skip


GUARD = Check(kind="guard", place=Place.GUARD, gate=True)
EXACT = Check(kind="exact", place=Place.DETERMINISTIC)
JUDGE = Check(kind="judge", place=Place.JUDGE)


def test_layers_run_in_order_whatever_order_the_task_names_them_in():
    checks = [JUDGE, EXACT, GUARD]
    assert layers.plan(checks, {}).run == (2,)
    assert layers.plan(checks, {2: done(GUARD, 1.0)}).run == (1,)
    assert layers.plan(checks, {2: done(GUARD, 1.0), 1: done(EXACT, 0.0)}).run == (0,)
    finished = {2: done(GUARD, 1.0), 1: done(EXACT, 0.0), 0: done(JUDGE, 1.0)}
    assert layers.plan(checks, finished) == layers.Plan(stop="complete")


def test_a_closed_gate_stops_and_pays_nothing():
    plan = layers.plan([GUARD, EXACT], {0: done(GUARD, 0.0)})
    assert plan == layers.Plan(stop="gate closed: guard")
    assert layers.verdict({0: done(GUARD, 0.0)}).reward == 0.0


def test_a_half_open_gate_is_closed():
    assert layers.plan([GUARD, EXACT], {0: done(GUARD, 0.5)}).run == ()


def test_a_failed_check_stops_without_reward():
    broken = done(GUARD, None, error="hung")
    assert layers.plan([GUARD, EXACT], {0: broken}).stop == "check failed: guard"
    assert layers.verdict({0: broken}).reward is None


def test_a_low_value_that_is_no_gate_stops_nothing():
    assert layers.plan([EXACT, JUDGE], {0: done(EXACT, 0.0)}).run == (1,)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.01, 1.01, "1", [1]])
def test_a_value_that_is_no_share_is_an_error(value):
    component = layers.judged(EXACT, "exact", Finding(value=value), 0.1)
    assert component.value is None
    assert "wanted a value in [0, 1]" in (component.error or "")


def test_evidence_that_is_no_json_is_an_error():
    assert layers.judged(EXACT, "e", Finding(value=1.0, evidence={"x": object()}), 0.0).error


def test_evidence_that_is_no_finite_number_is_kept_as_text():
    """A policy that wrote "nan" where a number is read chose `verifier_failed` over reward 0."""
    evidence = {"x": math.nan, "y": [-math.inf, 1.5]}
    component = layers.judged(EXACT, "e", Finding(value=0.0, evidence=evidence), 0.0)
    assert component.error is None
    assert component.evidence == {"x": "nan", "y": ["-inf", 1.5]}


def test_evidence_is_kept_small():
    evidence = {"text": "x" * 10_000, "list": list(range(1000))}
    component = layers.judged(EXACT, "e", Finding(value=1.0, evidence=evidence), 0.0)
    assert len(component.evidence["text"]) < 2_100
    assert len(component.evidence["list"]) == 32


def test_provenance_changes_with_parameters_version_and_assets():
    one = Check(kind="exact", params={"answer": "1"})
    others = [
        Check(kind="exact", params={"answer": "2"}),
        Check(kind="exact", params={"answer": "1"}, version=2),
        Check(kind="exact", params={"answer": "1"}, assets_sha256="ab"),
    ]
    assert len({layers.provenance(check) for check in (one, *others)}) == 4
    assert layers.provenance(one) == layers.provenance(Check(kind="exact", params={"answer": "1"}))


def test_names_tell_equal_kinds_apart():
    checks = [Check(kind="state"), Check(kind="exact"), Check(kind="state", params={"name": "log"}),
              Check(kind="state")]  # fmt: skip
    names = [layers.name(checks, index) for index in range(4)]
    assert names == ["state.1", "exact", "log", "state.2"]


def test_a_task_that_no_program_judges_is_unfit():
    assert layers.faults([EXACT]) == ()
    assert layers.faults([GUARD, EXACT, JUDGE]) == ()
    assert "judge is the only" in layers.faults([GUARD, JUDGE])[0]
    assert "no check beyond guards" in layers.faults([GUARD])[0]
    assert "no check beyond guards" in layers.faults([])[0]
    assert "weight" in layers.faults([Check(kind="exact", weight=math.nan)])[0]


CHECKS = st.builds(
    Check,
    kind=st.sampled_from(["a", "b"]),
    place=st.sampled_from(list(Place)),
    gate=st.booleans(),
    weight=st.floats(0, 3),
)
VALUES = st.one_of(st.none(), st.floats(0, 1), st.just("error"))


@given(st.lists(st.tuples(CHECKS, VALUES), min_size=1, max_size=8))
def test_stopping_early_never_makes_a_reward_larger(pairs):
    """Against running everything: where all values exist, the same closed gate decides."""
    checks = [check for check, _ in pairs]

    def component(index):
        value = pairs[index][1]
        error = "failed" if value == "error" else None
        return done(checks[index], None if error else value, error=error)

    so_far = {}
    while (plan := layers.plan(checks, so_far)).run:
        ranks = {checks[index].place.rank for index in plan.run}
        assert len(ranks) == 1
        assert not set(plan.run) & set(so_far)
        assert all(c.place.rank < min(ranks) for c in so_far.values())
        so_far |= {index: component(index) for index in plan.run}
    early = layers.verdict(so_far).reward
    full = layers.verdict({index: component(index) for index in range(len(checks))}).reward
    if full is not None:
        assert early == full
    elif early is not None:
        assert early == 0.0
