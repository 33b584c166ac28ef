from __future__ import annotations

import string
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import DomainError, UsageError
from posttrain.core.task import Task
from posttrain.domains import mixture
from posttrain.domains.domain import answer_task
from posttrain.domains.families import toy
from posttrain.domains.mixture import Key, Mixture, Split

A, B, C = (
    Key(domain=name, level=0, reference=name, weight=weight)
    for name, weight in (("a", 1.0), ("b", 2.0), ("c", 5.0))
)


def small(space: int, domain: str = "own.small"):
    """A maker of tasks with that many different questions."""

    def make(seed: int) -> Task:
        question = f"question {seed % space}"
        return answer_task(question, domain=domain, seed=seed, level=0, answer="x")

    return make


def test_a_draw_number_is_always_the_same_decision() -> None:
    one, two = Mixture([A, B, C], root_seed=7), Mixture([A, B, C], root_seed=7)
    assert [one.draw(n) for n in range(50)] == [two.draw(n) for n in reversed(range(50))][::-1]
    assert one.draw(3) != Mixture([A, B, C], root_seed=8).draw(3)


def test_draws_follow_the_weights_and_seeds_never_repeat() -> None:
    mixed = Mixture([A, B, C], root_seed=0)
    draws = [mixed.draw(number) for number in range(4000)]
    counts = Counter(draw.key.domain for draw in draws if draw is not None)
    for key, share in ((A, 1 / 8), (B, 2 / 8), (C, 5 / 8)):
        assert abs(counts[key.domain] / 4000 - share) < 0.03
    assert len({draw.seed for draw in draws if draw is not None}) == 4000


def test_domains_left_out_are_never_drawn_and_nothing_left_is_told() -> None:
    mixed = Mixture([A, B, C], root_seed=1)
    drawn = [mixed.draw(number, without=frozenset({"c"})) for number in range(300)]
    assert {draw.key.domain for draw in drawn if draw is not None} == {"a", "b"}
    assert mixed.draw(0, without=frozenset("abc")) is None


def test_a_mixture_refuses_what_makes_no_sense() -> None:
    with pytest.raises(UsageError, match="no domain"):
        Mixture([], root_seed=0)
    with pytest.raises(UsageError, match="'a' is in the mixture twice"):
        Mixture([A, B, A], root_seed=0)
    with pytest.raises(UsageError, match="weight above 0"):
        Mixture([Key(domain="a", level=0, reference="a", weight=0.0)], root_seed=0)


def test_levels_share_the_weight_and_unknown_ones_are_refused() -> None:
    keys = mixture.keys_of("d", levels=4, reference="d", wanted=(1, 3), weight=2.0)
    assert [(key.level, key.weight) for key in keys] == [(1, 1.0), (3, 1.0)]
    assert len(mixture.keys_of("d", levels=4, reference="d")) == 4
    with pytest.raises(UsageError, match=r"'d' has levels 0 to 3, each once; got level 4"):
        mixture.keys_of("d", levels=4, reference="d", wanted=(4,))


@given(root_seed=st.integers(0, 2**40), level=st.integers(0, 2), share=st.floats(0.1, 0.5))
@settings(max_examples=15, deadline=None)
def test_training_and_heldout_tasks_never_share_content(
    root_seed: int, level: int, share: float
) -> None:
    domain = toy.domain("digit", name="toy.digit")
    key = Key(domain=domain.name, level=level, reference=domain.name)

    def make(seed: int) -> Task:
        return domain.task(seed, level)

    held = mixture.distinct(
        make,
        key=key,
        root_seed=root_seed,
        count=20,
        split=Split.HELDOUT,
        heldout_share=share,
    )
    trained = [
        mixture.training_task(
            make, key=key, root_seed=root_seed, number=number, heldout_share=share
        )
        for number in range(60)
    ]
    objectives = {task.description.objective for task in held}
    assert len(objectives) == 20
    assert not objectives & {task.description.objective for task in trained}


def test_the_same_question_under_two_names_stays_on_one_side() -> None:
    for number in range(40):
        one, other = small(40, "own.one")(number), small(40, "own.other")(number)
        assert one.content_key != other.content_key
        assert mixture.is_heldout(one, 0.5) == mixture.is_heldout(other, 0.5)


def test_about_the_asked_share_is_held_out() -> None:
    held = [mixture.is_heldout(small(10**9)(seed), 0.2) for seed in range(2000)]
    assert abs(sum(held) / 2000 - 0.2) < 0.03


def test_a_small_question_space_is_searched_whole_and_gives_what_there_is() -> None:
    make = small(30)
    held = sum(mixture.is_heldout(make(seed), 0.3) for seed in range(30))
    key = Key(domain="own.small", level=0, reference="own.small")
    found = mixture.distinct(
        make, key=key, root_seed=0, count=held, split=Split.HELDOUT, heldout_share=0.3
    )
    assert len({task.content_key for task in found}) == held
    more = mixture.distinct(
        make, key=key, root_seed=0, count=held + 1, split=Split.HELDOUT, heldout_share=0.3
    )
    assert more == found
    none = mixture.distinct(
        make, key=key, root_seed=0, count=1, split=Split.HELDOUT, heldout_share=0.0
    )
    assert none == []


def test_a_space_that_is_all_held_out_cannot_be_trained_on() -> None:
    key = Key(domain="own.small", level=0, reference="own.small")
    with pytest.raises(DomainError, match=r"own.small/0: .* only held-out tasks"):
        mixture.training_task(small(3), key=key, root_seed=0, number=0, heldout_share=1.0)


@given(names=st.lists(st.sampled_from(string.ascii_lowercase), min_size=1, unique=True))
def test_every_weighted_key_can_be_drawn(names: list[str]) -> None:
    keys = [Key(domain=name, level=0, reference=name) for name in names]
    mixed = Mixture(keys, root_seed=3)
    seen = {draw.key.domain for n in range(len(names) * 40) if (draw := mixed.draw(n)) is not None}
    assert seen == set(names)
