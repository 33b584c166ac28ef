"""How often verdicts are wrong: by hand, and unbiased by simulation; how far reviewers agree."""

from __future__ import annotations

from statistics import fmean

import pytest

from posttrain.core import seeds
from posttrain.core.events import Labelled
from posttrain.evals.rates import Agreement, VerdictRates, agreement, rates
from posttrain.evals.review import Queue
from posttrain.evals.selection import Facts, ReviewPlan, Voices, select
from posttrain.observe.statistics import wilson
from tests.evals.test_selection import fact


def said(one: Facts, label: str, author: str = "ann") -> Labelled:
    return Labelled(key=one.key, label=label, author=author, reason="r", reward=one.reward)


def judged(facts: list[Facts], plan: ReviewPlan, labels: list[Labelled]) -> list[VerdictRates]:
    return rates(Queue(facts, select(facts, plan=plan), labels, plan=plan))


WHOLE = ReviewPlan(share=1.0, second=0.0)


def test_rates_by_hand() -> None:
    accepted = [fact(n, verifier="exact@1") for n in range(5)]
    rejected = [fact(10 + n, verifier="exact@1", reward=0.0) for n in range(4)]
    labels = [
        said(accepted[0], "hack"), said(accepted[1], "false_accept"), said(accepted[2], "right"),
        said(accepted[3], "task_bug"),
        said(rejected[0], "false_reject"), said(rejected[1], "hack"), said(rejected[2], "unclear"),
    ]  # fmt: skip
    own, total = judged([*accepted, *rejected], WHOLE, labels)
    assert (own.domain, own.verifier, total.domain) == ("a", "exact@1", "all")
    accepts, rejects = own.false_accept, own.false_reject
    assert (accepts.labelled, accepts.sampled) == (3, 5)
    assert accepts.rate == pytest.approx(2 / 3)
    assert accepts.interval == wilson(2, 3)
    assert (rejects.rate, rejects.labelled, rejects.sampled) == (0.5, 2, 4)
    assert total.false_accept == accepts


def test_what_was_picked_for_being_odd_counts_for_nothing() -> None:
    made = [fact(n) for n in range(100)]
    odd = max(made, key=lambda one: one.chance)
    plan = ReviewPlan(share=0.0, least=2)
    chosen = select(made, voices=[Voices(odd.key, 0.0, 1.0)], plan=plan)
    queue = Queue(made, chosen, [said(odd, "hack")], plan=plan)
    assert odd.key in {item.facts.key for item in queue}
    assert rates(queue)[-1].false_accept.rate is None


def test_nothing_is_known_as_long_as_only_odd_attempts_are_labelled() -> None:
    made = [fact(n) for n in range(10)]
    chosen = select(made, voices=[Voices(made[0].key, 0.0, 1.0)], plan=WHOLE)
    labels = [said(made[0], "hack")]
    found = rates(Queue(made, chosen, labels, plan=WHOLE))[-1].false_accept
    assert (found.rate, found.labelled, found.sampled) == (None, 1, 10)
    labels.append(said(made[1], "right"))
    found = rates(Queue(made, chosen, labels, plan=WHOLE))[-1].false_accept
    assert found.rate == pytest.approx(0.1)


def test_the_rate_over_all_weighs_domains_by_their_attempts() -> None:
    """Two of 200 sampled in one domain, two of two in the other."""
    large = [fact(n) for n in range(200)]
    small = [fact(1000 + n, domain="b") for n in range(2)]
    plan = ReviewPlan(share=0.0, least=2, second=0.0)
    chosen = select([*large, *small], plan=plan)
    labels = [
        said(one.facts, "hack" if one.facts.domain == "b" else "right") for one in chosen.values()
    ]
    found = rates(Queue([*large, *small], chosen, labels, plan=plan))
    assert [one.false_accept.rate for one in found] == [0.0, 1.0, pytest.approx(2 / 202)]
    # effective labels: (100 + 100 + 1 + 1)² / (100² + 100² + 1 + 1) = 2.04
    assert found[-1].false_accept.interval == wilson(0, 2)


def test_a_label_judges_the_verdict_that_counts_now() -> None:
    """It was said to be a false accept; the mended verifier rejects it, rightly."""
    before = fact(0)
    label = said(before, "false_accept")
    after = before._replace(reward=0.0, first_reward=1.0, judged=2, verifier="exact@2")
    (own, _) = judged([after], WHOLE, [label])
    assert own.verifier == "exact@2"
    assert own.false_accept.sampled == 0
    assert own.false_reject.rate == 0.0


@pytest.mark.parametrize("labelled", [1.0, 0.5])
def test_rates_are_unbiased_though_odd_attempts_are_wrong_more_often_and_come_first(
    labelled: float,
) -> None:
    """30 % of what is odd is wrong, 5 % of the rest, a tenth is odd: 7.5 % in all."""
    plan, means, naive, true = ReviewPlan(share=0.2, least=2, second=0.0, most=1000), [], [], []
    for root in range(80):
        made = [fact(n, root=root) for n in range(400)]
        odd = {one.key for one in made if seeds.unit("odd", one.key) < 0.1}
        wrong = {one.key for one in made
                 if seeds.unit("wrong", one.key) < (0.3 if one.key in odd else 0.05)}  # fmt: skip
        heard = [Voices(key, 0.0, 1.0) for key in odd]
        chosen = select(made, voices=heard, plan=plan)
        base = [one.facts for one in chosen.values() if one.inclusion is not None]
        done = base[: round(labelled * len(base))]  # in the order of the queue: odd ones first
        labels = [said(one, "false_accept" if one.key in wrong else "right") for one in done]
        found = rates(Queue(made, chosen, labels, plan=plan))[-1].false_accept
        assert found.rate is not None
        means.append(found.rate)
        naive.append(fmean(one.key in wrong for one in done))
        true.append(len(wrong) / len(made))
    error = (0.075 * 0.925 / (80 * labelled) / len(means)) ** 0.5
    assert abs(fmean(means) - fmean(true)) < 4 * error
    if labelled < 1:
        assert fmean(naive) - fmean(true) > 4 * error


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for root in range(100):
        made = [fact(n, root=root) for n in range(200)]
        wrong = {one.key for one in made if seeds.unit("wrong", one.key) < 0.2}
        chosen = select(made, plan=(plan := ReviewPlan(share=0.2, second=0.0)))
        labels = [
            said(one.facts, "hack" if one.facts.key in wrong else "right")
            for one in chosen.values()
        ]
        found = rates(Queue(made, chosen, labels, plan=plan))[-1].false_accept.interval
        covered += found.low <= len(wrong) / len(made) <= found.high
    assert covered >= 0.92 * 100


def test_agreement_by_hand() -> None:
    """Cohen 1960: agreement 7 of 10; by chance 0.6 × 0.5 + 0.4 × 0.5 = 0.5; kappa 0.4."""
    facts = [fact(n) for n in range(11)]
    pairs = [("right", "right")] * 4 + [("right", "hack")] * 2 + [("hack", "right")]
    pairs += [("hack", "hack")] * 3
    labels = [said(facts[10], "hack")]
    for one, (first, second) in zip(facts, pairs, strict=False):
        labels += [said(one, first, "ann"), said(one, second, "bob"), said(one, "unclear", "cat")]
    items = list(Queue(facts, select(facts, plan=WHOLE), labels, plan=WHOLE))
    assert agreement(items) == Agreement(pairs=10, same=7, kappa=pytest.approx(0.4))


def test_agreement_of_nothing_is_unknown() -> None:
    assert agreement([]) == Agreement(pairs=0, same=0, kappa=None)
    same = [said(fact(0), "right"), said(fact(0), "right", "bob")]
    items = Queue([fact(0)], select([fact(0)], plan=WHOLE), same, plan=WHOLE)
    assert agreement(items) == Agreement(pairs=1, same=1, kappa=None)
