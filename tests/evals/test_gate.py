import pytest

from posttrain.evals import gate


def rates(passed, n=128):
    return [1] * passed + [0] * (n - passed)


@pytest.fixture
def decided(evaluated):
    def run(before, after, *, constants=None, watch=()):
        one, two = evaluated(before, constants=constants), evaluated(after, constants=constants)
        return gate.decide(one, two, watch=watch)

    return run


def test_a_significant_gain_above_the_constant_answer_opens_the_gate(decided):
    decision = decided({"a": rates(20), "b": rates(20)}, {"a": rates(60), "b": rates(22)})
    assert decision.promoted
    assert decision.improved == ("a",)
    assert decision.fallen == ()
    assert decision.macro_after - decision.macro_before == pytest.approx(42 / 256)
    assert decision.macro_p < 0.001


def test_a_gain_below_the_constant_answer_is_none(decided):
    decision = decided({"a": rates(20)}, {"a": rates(60)}, constants={"a": 0.5})
    assert decision.improved == ()
    assert decision.comparisons[0].p < 0.01
    assert not decision.comparisons[0].above_constant
    assert decided({"a": rates(20)}, {"a": rates(70)}, constants={"a": 0.5}).improved == ("a",)


def test_one_fallen_watch_domain_closes_the_gate(decided):
    decision = decided(
        {"a": rates(20), "w": rates(80)}, {"a": rates(60), "w": rates(40)}, watch=["w"]
    )
    assert decision.improved == ("a",)
    assert decision.fallen == ("w",)
    assert not decision.promoted
    assert "w fell from 0.625 to 0.312" in decision.reasons[0]


def test_a_watch_domain_neither_improves_nor_counts_in_the_macro_gain(decided):
    decision = decided(
        {"a": rates(20), "w": rates(20)}, {"a": rates(20), "w": rates(90)}, watch=["w"]
    )
    assert decision.improved == ()
    assert decision.macro_before == decision.macro_after
    assert decision.reasons == ("no significant macro gain (+0.000, p 1)",)


def test_falls_are_corrected_over_all_evaluated_domains(decided):
    """Six pairs lost and none gained: p 0.031 alone, not after correction over three domains."""
    before = {"a": rates(20), "b": rates(20), "c": rates(20)}
    after = {"a": rates(60), "b": rates(14), "c": rates(20)}
    decision = decided(before, after)
    assert decision.comparisons[1].p == pytest.approx(0.03125)
    assert decision.comparisons[1].p_holm > 0.05
    assert decision.fallen == ()
    assert decided({"b": rates(20)}, {"b": rates(14)}).fallen == ("b",)


def test_too_many_lost_attempts_close_the_gate(decided):
    decision = decided({"a": rates(20, 100)}, {"a": rates(60, 80) + [None] * 20})
    assert decision.comparisons[0].coverage == 0.8
    assert any("80% of its tasks" in reason for reason in decision.reasons)


def test_a_domain_that_was_lost_whole_is_no_gain_and_no_fall(decided):
    decision = decided({"a": rates(1, 4), "b": [1]}, {"a": rates(4, 4), "b": [None]})
    assert decision.comparisons[1].n == 0
    assert decision.fallen == ()
    assert not decision.promoted
