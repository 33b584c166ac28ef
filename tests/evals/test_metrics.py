import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core import codec
from posttrain.core.errors import UsageError
from posttrain.core.events import Note
from posttrain.core.trajectory import Sampling
from posttrain.evals import gate, metrics, summary
from posttrain.evals.metrics import Evaluation


def test_lost_attempts_stand_beside_the_rate_and_never_in_it(evaluated):
    """BR-25: a verifier's time-out was counted as a wrong answer."""
    score = metrics.scores(evaluated({"a": [1, 0, None, 1]}))["a"]
    assert (score.passed, score.scored, score.lost) == (2, 3, 1)
    assert score.rate == score.mean_reward == pytest.approx(2 / 3)


def test_a_domain_without_any_signal_has_no_rate(evaluated):
    both = evaluated({"a": [None, None], "b": [1, 0]})
    assert metrics.scores(both)["a"].rate is None
    assert metrics.macro_rate(both) == 0.5
    assert metrics.macro_rate(evaluated({"a": [None]})) is None


def test_partial_rewards_count_in_the_mean_and_not_as_passed(evaluated):
    score = metrics.scores(evaluated({"a": [0.5, 1.0]}))["a"]
    assert (score.passed, score.mean_reward) == (1, 0.75)


def test_the_macro_rate_weighs_domains_equally(evaluated):
    assert metrics.macro_rate(evaluated({"a": [1], "b": [0] * 9})) == 0.5


def test_pairs_are_tasks_scored_both_times(evaluated):
    before = evaluated({"a": [0, 0, 1, 1, None, 0]})
    after = evaluated({"a": [1, 0, 0, 1, 1, None]}, weights="v")
    (found,) = gate.decide(before, after).comparisons
    assert (found.n, found.before, found.after, found.p) == (4, 0.5, 0.5, 1.0)
    assert found.coverage == pytest.approx(4 / 6)


def test_pairing_uses_the_exact_test(evaluated):
    before, after = evaluated({"a": [0] * 9 + [1]}), evaluated({"a": [1] * 9 + [0]})
    assert gate.decide(before, after).comparisons[0].p == pytest.approx(0.021484375)


def test_different_suites_samplings_or_tasks_are_not_compared(evaluated):
    one = evaluated({"a": [1, 0]})
    for other in (
        evaluated({"a": [1, 0]}, suite="t"),
        evaluated({"a": [1, 0]}, sampling=Sampling(temperature=1.0)),
        evaluated({"a": [1]}),
        evaluated({"a": [1], "b": [0]}),
    ):
        with pytest.raises(UsageError, match="wanted"):
            metrics.pairs(one, other)


def test_the_macro_gain_flips_signs_within_domains(evaluated):
    before, after = evaluated({"a": [0] * 4, "b": [0] * 4}), evaluated({"a": [1] * 4, "b": [1] * 4})
    assert metrics.macro_gain_p(before, after, ["a", "b"]) == pytest.approx(2 / 2**8)
    assert metrics.macro_gain_p(before, before, ["a", "b"]) == 1.0


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [(5, 2, 3, 0.9), (6, 1, 2, 0.333333), (8, 3, 4, 0.928571), (4, 1, 4, 1.0), (1, 0, 1, 0.0)],
)
def test_pass_at_k_draws_without_replacement(n, c, k, value):
    """BR-36: resampling with replacement gave 0.6836 for (4, 1, 4)."""
    assert metrics.pass_at_k(n, c, k) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 0, 5), (3, 1, 5), (1, 1, 10), (3, 4, 2), (3, 1, 0)])
def test_pass_at_k_is_refused_with_too_few_attempts(n, c, k):
    """BR-36: the estimator returned 1.0 for unsolved problems."""
    with pytest.raises(UsageError, match="pass@"):
        metrics.pass_at_k(n, c, k)


def test_an_evaluation_survives_json(evaluated):
    one = evaluated({"a": [1, None, 0.5]}, constants={"a": 0.25})
    assert codec.from_json(Evaluation, codec.to_json(one)) == one


def test_the_note_of_an_evaluation_is_what_the_report_reads(evaluated):
    before = evaluated({"a": [0] * 9 + [1, None]}, constants={"a": 0.25})
    after = evaluated({"a": [1] * 9 + [0, 1]}, constants={"a": 0.25}, weights="v")
    notes = [
        Note(kind="eval", data=metrics.note_data(before, "base")),
        Note(kind="eval", data=metrics.note_data(after, "rl")),
    ]
    outcomes = summary.outcomes_of(notes)
    told, kept = outcomes.evaluations["rl"], metrics.scores(after)
    assert metrics.scores(told)["a"].interval == kept["a"].interval
    assert metrics.pairs(outcomes.evaluations["base"], told) == metrics.pairs(before, after)
    assert told.constants == after.constants


REWARDS = st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=12)


@given(data=st.data())
def test_a_comparison_is_of_what_was_scored_both_times(evaluated, data):
    old = data.draw(REWARDS)
    new = data.draw(
        st.lists(st.sampled_from([0.0, 1.0, None]), min_size=len(old), max_size=len(old))
    )
    (found,) = gate.decide(evaluated({"a": old}), evaluated({"a": new})).comparisons
    both = [(a, b) for a, b in zip(old, new, strict=True) if None not in (a, b)]
    assert found.n == len(both)
    assert found.n * (found.after - found.before) == pytest.approx(sum(b - a for a, b in both))
    assert 0 < found.p <= 1
