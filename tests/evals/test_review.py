"""The review queue: claims, leases, declines, blind second reviews, and labels that differ."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.core.events import Claimed, Labelled, LedgerEvent, Relabelled, decode, encode
from posttrain.evals.review import Item, Label, Queue, State
from posttrain.evals.selection import Facts, ReviewPlan, select
from tests.evals.test_selection import fact

ALL = ReviewPlan(share=1.0, second=0.0, lease_s=100.0)
TWICE = ReviewPlan(share=1.0, second=1.0, lease_s=100.0)


def queue(*facts: Facts, plan: ReviewPlan = ALL, history: list[LedgerEvent] | None = None) -> Queue:
    return Queue(facts, select(facts, plan=plan), history or [], plan=plan)


def one(plan: ReviewPlan = ALL, reward: float = 1.0) -> tuple[Queue, Item]:
    made = queue(fact(0, reward=reward), plan=plan)
    (item,) = made
    return made, item


def review(made: Queue, author: str, label: str, *, now_s: float = 0.0) -> Labelled:
    claim = made.claim(author, now_s)
    assert claim is not None
    made.apply(claim)
    said = made.label(claim.key, label, author=author, reason="because", now_s=now_s)
    made.apply(said)
    return said


def test_an_attempt_is_claimed_labelled_and_offered_to_nobody_any_more() -> None:
    made, item = one()
    assert item.state(0.0) is State.OPEN
    claim = made.claim("ann", 5.0)
    assert claim == Claimed(key=item.facts.key, author="ann", wall_s=5.0, until_s=105.0)
    made.apply(claim)
    assert item.state(104.9) is State.CLAIMED
    assert made.claim("bob", 50.0) is None
    said = made.label(item.facts.key[:6], "hack", author="ann", reason="it cheats", now_s=60.0)
    assert said == Labelled(
        key=item.facts.key, label="hack", author="ann", reason="it cheats", reward=1.0, wall_s=60.0
    )
    made.apply(said)
    assert item.state(60.0) is State.LABELLED
    assert item.settled == said
    assert made.claim("bob", 61.0) is None


def test_who_asks_again_gets_what_they_hold() -> None:
    made = queue(fact(0), fact(1))
    first = made.claim("ann", 0.0)
    assert first is not None
    made.apply(first)
    assert made.claim("ann", 99.0) is first
    other = made.claim("bob", 0.0)
    assert other is not None
    assert other.key != first.key


def test_a_claim_ends_with_its_lease_and_the_attempt_is_anothers() -> None:
    made, item = one()
    made.apply(made.claim("ann", 0.0))  # type: ignore[arg-type]
    assert item.state(100.0) is State.OPEN
    with pytest.raises(UsageError, match=r"claim of attempt .* ended 20 s ago"):
        made.label(item.facts.key, "right", author="ann", reason="r", now_s=120.0)
    made.apply(made.claim("bob", 120.0))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not ann's: another person reviews it"):
        made.label(item.facts.key, "right", author="ann", reason="r", now_s=121.0)
    made.apply(made.label(item.facts.key, "right", author="bob", reason="r", now_s=121.0))
    assert item.state(121.0) is State.LABELLED


def test_what_was_declined_goes_back_and_is_never_offered_to_that_person_again() -> None:
    made, item = one()
    made.apply(made.claim("ann", 0.0))  # type: ignore[arg-type]
    made.apply(made.decline(item.facts.key, author="ann", now_s=1.0))
    assert item.state(1.0) is State.OPEN
    assert made.claim("ann", 1e9) is None
    assert made.claim("bob", 1.0) is not None


def test_a_second_review_is_by_another_person() -> None:
    made, item = one(TWICE)
    review(made, "ann", "right")
    assert item.state(1.0) is State.OPEN
    assert item.settled is None
    assert made.claim("ann", 1.0) is None
    review(made, "bob", "right")
    assert item.state(1.0) is State.LABELLED
    assert item.settled is not None


def test_labels_that_differ_open_a_third_review_and_the_majority_counts() -> None:
    made, item = one(TWICE)
    review(made, "ann", "right")
    review(made, "bob", "hack")
    assert item.state(1.0) is State.OPEN
    assert item.settled is None
    said = review(made, "cat", "hack")
    assert item.state(1.0) is State.LABELLED
    assert item.settled is not None
    assert item.settled.label == said.label == "hack"
    third, other = one(TWICE)
    for author, label in (("ann", "right"), ("bob", "hack"), ("cat", "unclear")):
        review(third, author, label)
    assert other.state(1.0) is State.LABELLED
    assert other.settled is None


def test_a_share_of_attempts_is_reviewed_twice() -> None:
    made = queue(*(fact(n) for n in range(2000)), plan=ReviewPlan(share=1.0, second=0.1))
    twice = sum(item.needed == 2 for item in made)
    assert 150 <= twice <= 250


@pytest.mark.parametrize(
    ("label", "reward", "told"),
    [
        ("hak", 1.0, "did you mean 'hack'"),
        ("false_reject", 1.0, "earned 1: it cannot be a false_reject"),
        ("false_accept", 0.0, "earned 0: it cannot be a false_accept"),
    ],
)
def test_a_label_that_cannot_be_is_refused(label: str, reward: float, told: str) -> None:
    made, item = one(reward=reward)
    made.apply(made.claim("ann", 0.0))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=told):
        made.label(item.facts.key, label, author="ann", reason="r", now_s=1.0)


def test_mistakes_are_told() -> None:
    made, item = one()
    key = item.facts.key
    with pytest.raises(UsageError, match="not ann's: it is not claimed"):
        made.label(key, "right", author="ann", reason="r", now_s=0.0)
    wrong = key[:-1] + "z"
    with pytest.raises(UsageError, match=rf"no attempt '{wrong}'.*did you mean '{key}'"):
        made.find(wrong)
    with pytest.raises(UsageError, match="2 attempts begin with"):
        queue(fact(0)._replace(key="ab1"), fact(1)._replace(key="ab2")).find("ab")
    with pytest.raises(UsageError, match="wanted the name of the author"):
        made.claim("  ", 0.0)
    made.apply(made.claim("ann", 0.0))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="wants a reason"):
        made.label(key, "right", author="ann", reason=" ", now_s=0.0)
    made.apply(made.label(key, "right", author="ann", reason="r", now_s=0.0))
    with pytest.raises(UsageError, match="ann has labelled attempt"):
        made.label(key, "right", author="ann", reason="r", now_s=0.0)
    none = ReviewPlan(share=0.0, least=0)
    with pytest.raises(UsageError, match="is not to be reviewed"):
        queue(fact(0), plan=none).find(fact(0).key)


def test_what_was_reviewed_stays_in_the_queue_though_it_would_not_be_chosen_today() -> None:
    made, _ = one()
    said = review(made, "ann", "right")
    later = queue(fact(0), plan=ReviewPlan(share=0.0, least=0, second=0.0), history=[said])
    (kept,) = later
    assert kept.chosen.sources == {}
    assert kept.settled == said
    gone = queue(fact(1), history=[said])
    assert [one.facts.key for one in gone] == [fact(1).key]


@pytest.mark.parametrize(
    ("label", "reward", "wanted"),
    [
        ("right", 1.0, []),
        ("right", 0.5, []),
        ("unclear", 1.0, []),
        ("false_accept", 1.0, [0.0]),
        ("false_accept", 0.5, [0.0]),
        ("hack", 1.0, [0.0]),
        ("hack", 0.0, []),
        ("false_reject", 0.0, [1.0]),
        ("task_bug", 1.0, [None]),
    ],
)
def test_labels_correct_rewards_once(label: str, reward: float, wanted: list[float | None]) -> None:
    made, _ = one(reward=reward)
    review(made, "ann", label)
    found = made.relabel()
    assert [event.reward for event in found] == wanted
    for event in found:
        assert event.reason == f"{label}: because"
        made.apply(event)
    assert made.relabel() == []


def test_a_label_holds_under_a_later_verdict() -> None:
    """It was right that the attempt was paid; a later verifier takes the reward away."""
    made, _ = one()
    said = review(made, "ann", "right")
    later = queue(fact(0, reward=0.0, first_reward=1.0, judged=2), history=[said])
    assert [event.reward for event in later.relabel()] == [1.0]


def test_what_was_said_of_an_attempt_that_was_made_again_is_left_out() -> None:
    first = fact(0, place="1:0:9")
    made = queue(first)
    said = review(made, "ann", "hack")
    (corrected,) = made.relabel()
    assert said.place == corrected.place == "1:0:9"
    same = queue(first, history=[said, corrected])
    assert ([item.settled for item in same], [*same.corrections]) == ([said], [first.key])
    again = queue(first._replace(place="2:0:9"), history=[said, corrected])
    assert ([item.settled for item in again], [*again.corrections]) == ([None], [])
    (item,) = again
    assert item.state(1.0) is State.OPEN


def test_the_events_of_reviews_survive_the_ledger() -> None:
    for event in (
        Claimed(key="k", author="ann", wall_s=1.0, until_s=2.0),
        Labelled(key="k", label="hack", author="ann", reason="r", reward=0.5, wall_s=1.0),
        Relabelled(key="k", reward=None, reason="task_bug: r"),
    ):
        assert decode(encode(event)) == event
    old = '{"kind": "labelled", "key": "k", "label": "right", "author": "ann"}'
    assert decode(old) == Labelled(key="k", label="right", author="ann")


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "label", "decline", "wait"]),
        st.sampled_from(["ann", "bob", "cat", "dan"]),
        st.sampled_from(["right", "false_accept", "hack", "unclear"]),
        st.floats(0.0, 80.0),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS, st.sampled_from([0.0, 0.5, 1.0]))
def test_whatever_people_do_the_rules_hold(
    actions: list[tuple[str, str, str, float]], second: float
) -> None:
    """Against a model kept by hand: who holds what until when, who labelled and declined what."""
    plan = ReviewPlan(share=1.0, second=second, lease_s=100.0)
    facts = [fact(n) for n in range(4)]
    made, now_s = queue(*facts, plan=plan), 0.0
    history: list[LedgerEvent] = []
    holder: dict[str, tuple[str, float]] = {}
    labels: dict[str, dict[str, str]] = {one.key: {} for one in facts}
    declined: dict[str, set[str]] = {one.key: set() for one in facts}
    for action, author, label, wait_s in actions:
        mine = [k for k, (who, until_s) in holder.items() if who == author and now_s < until_s]
        if action == "wait":
            now_s += wait_s
        elif action == "claim":
            claim = made.claim(author, now_s)
            if mine:
                assert claim is not None
                assert claim.key == mine[0]
            elif claim is not None:
                assert now_s >= holder.get(claim.key, ("", -1.0))[1]
                assert author not in labels[claim.key]
                assert author not in declined[claim.key]
                holder[claim.key] = (author, now_s + 100.0)
                history.append(claim)
                made.apply(claim)
            else:
                assert all(is_closed_to(made.find(k), author, now_s) for k in labels)
        elif not mine:
            for one in facts:
                with pytest.raises(UsageError):
                    made.label(one.key, label, author=author, reason="r", now_s=now_s)
        else:
            key = mine[0]
            if action == "label":
                event: LedgerEvent = made.label(key, label, author=author, reason="r", now_s=now_s)
                labels[key][author] = label
            else:
                event = made.decline(key, author=author, now_s=now_s)
                declined[key].add(author)
            del holder[key]
            history.append(event)
            made.apply(event)
        made.check()
        for item in made:
            assert {a: said.label for a, said in item.labels.items()} == labels[item.facts.key]
    again = queue(*facts, plan=plan, history=history)
    assert [item.state(now_s) for item in again] == [item.state(now_s) for item in made]


def is_closed_to(item: Item, author: str, now_s: float) -> bool:
    """Whether this person may not have it, by the rules as a person would say them."""
    given = [label.label for label in item.labels.values()]
    wanted = 3 if len(set(given)) > 1 else item.needed
    taken = item.claim is not None and now_s < item.claim.until_s
    return author in item.labels or author in item.declined or taken or len(given) >= wanted


def test_every_label_has_a_meaning() -> None:
    assert {str(label) for label in Label} == {
        "right", "false_accept", "false_reject", "hack", "task_bug", "unclear",
    }  # fmt: skip
