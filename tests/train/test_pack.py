from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.ports import Example
from posttrain.train.advantages import advantages
from posttrain.train.algorithms import Normaliser
from posttrain.train.pack import (
    Trainable,
    from_examples,
    from_groups,
    lined_up,
    normalised,
    pack,
    trained_indices,
)
from tests.train.builders import group, member, random_groups, row


def rows_of(groups, *, keep_flat=False):
    return from_groups(groups, [advantages(g.rewards) for g in groups], keep_flat=keep_flat)


def contexts(micros):
    """(context that predicts it, token, behaviour, weight) of every target, re-read from the
    packed layout without the packer's own bookkeeping.
    """
    found = []
    for micro in micros:
        seen, start = {}, 0
        for tree in micro.trees:
            for i in range(len(tree.root)):
                seen[start + i] = tree.root[: i + 1]
            start += len(tree.root)
            for branch in tree.branches:
                for i in range(len(branch)):
                    seen[start + i] = tree.root + branch[: i + 1]
                start += len(branch)
        found += [(seen[t.place], t.id, t.behaviour, t.weight) for t in micro.targets]
    return sorted(found)


def expected(trainables):
    return sorted(
        (t.row.ids_T[:i], t.row.ids_T[i], t.row.logprobs_T[i], t.weight)
        for t in trainables
        if not t.silent
        for i in trained_indices(t.row)
    )


def test_a_group_stores_its_prompt_once_and_no_input_that_predicts_nothing():
    prompt = list(range(10, 20))
    members = [member([row(prompt, [i, i, 2])], float(i % 2), number=i) for i in range(4)]
    (micro,) = pack(rows_of([group(members)]), budget=1000)
    assert micro.num_tokens == 10 + 4 * 2
    assert len(micro.targets) == 12
    assert micro.positions_T == [*range(10)] + [10, 11] * 4


def test_replies_that_differ_only_in_their_last_token_are_one_branch():
    replies = [[7, 8, 1], [7, 8, 2], [7, 2], [2], [7, 8, 1]]
    members = [member([row([5, 6], r)], float(i % 2), number=i) for i, r in enumerate(replies)]
    (micro,) = pack(rows_of([group(members)]), budget=1000)
    assert micro.ids_T == [5, 6, 7, 8]
    assert len(micro.targets) == 3 + 3 + 2 + 1 + 3
    assert micro.num_rows == 5


def test_two_groups_with_the_same_prompt_share_it():
    groups = [
        group([member([row([5], [i])], float(i), number=i) for i in range(2)], draw=draw)
        for draw in range(2)
    ]
    (micro,) = pack(rows_of(groups), budget=1000)
    assert [tree.root for tree in micro.trees] == [(5,)]
    assert len(micro.targets) == 4
    assert micro.num_rows == 4


def test_examples_share_the_wording_they_begin_with():
    wording = list(range(10, 40))
    rows = [row([*wording, 50 + i], [i, 2]) for i in range(4)] + [row([1, 2, 3], [4, 2])]
    (micro,) = pack(from_examples([Example(row=r) for r in rows]), budget=1000)
    assert micro.num_tokens == 30 + 4 * 2 + 4
    assert sorted(len(tree.branches) for tree in micro.trees) == [0, 4]


def test_branches_of_very_different_length_get_a_root_each():
    rows = [row([5, 6], [i] * 3) for i in range(7, 12)] + [row([5, 6], [20] * 90)]
    (micro,) = pack(from_examples([Example(row=r) for r in rows]), budget=1000)
    assert sorted(len(tree.branches) for tree in micro.trees) == [0, 5]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=7), min_size=1, max_size=9))
def test_no_grouping_by_a_common_beginning_takes_fewer_tokens(sequences):
    rows = [row(ids, [9, 9]) for ids in sequences]
    (micro,) = pack(from_examples([Example(row=r) for r in rows]), budget=10_000)
    inputs = {tuple([*ids, 9]) for ids in sequences}
    for depth in range(8):
        begun = {ids[:depth] for ids in inputs}
        by_depth = sum(len(b) for b in begun) + sum(len(ids[depth:]) for ids in inputs)
        roots = sum(len(tree.root) for tree in micro.trees)
        assert micro.num_tokens <= by_depth + roots  # padding may cost a second copy of a root


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 5))
def test_every_target_keeps_its_context_whatever_the_budget(seed, budget, number):
    trainables = normalised(rows_of(random_groups(number, seed=seed)), Normaliser.SEQUENCE_MEAN)
    micros = pack(trainables, budget=budget)
    assert contexts(micros) == expected(trainables)
    for micro in micros:
        assert len(micro.ids_T) == len(micro.positions_T) == micro.num_tokens
        assert [t.place for t in micro.targets] == sorted(t.place for t in micro.targets)
        assert {t.sequence for t in micro.targets} == set(range(micro.num_rows))
        single = len(micro.trees) == 1 and len(micro.trees[0].branches) <= 1
        assert micro.num_tokens <= budget or single


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(5, 80))
def test_packing_does_not_depend_on_the_order_of_arrival(seed, budget):
    trainables = normalised(rows_of(random_groups(4, seed=seed)), Normaliser.TOKEN_MEAN)
    shuffled = list(trainables)
    random.Random(seed).shuffle(shuffled)
    assert pack(shuffled, budget=budget) == pack(trainables, budget=budget)


def test_normalisers_weigh_as_computed_by_hand_BR_07():
    per_token = [3.0, 1.0, 2.0]
    trainables = [Trainable(row=row([9], [1] * n), sequence=i) for i, n in enumerate([2, 5, 9])]
    weighed = normalised(trainables, Normaliser.TOKEN_MEAN)
    loss = sum(t.weight * t.row.num_trained * x for t, x in zip(weighed, per_token, strict=True))
    assert loss == pytest.approx(29 / 16)

    pair = [Trainable(row=row([9], [1] * n), sequence=i) for i, n in enumerate([4, 1])]
    for normaliser, right in (
        (Normaliser.TOKEN_MEAN, 2.0),
        (Normaliser.SEQUENCE_MEAN, 3.5),
        (Normaliser.CONSTANT, 0.625),
    ):
        weighed = normalised(pair, normaliser, constant_length=8)
        loss = sum(
            t.weight * t.row.num_trained * x for t, x in zip(weighed, [1.0, 6.0], strict=True)
        )
        assert loss == pytest.approx(right)


def test_the_split_leaves_the_sum_of_weights_as_it_was_BR_07():
    trainables = normalised(rows_of(random_groups(5)), Normaliser.TOKEN_MEAN)
    for budget in (1, 17, 10_000):
        total = sum(t.weight for micro in pack(trainables, budget=budget) for t in micro.targets)
        assert total == pytest.approx(1.0)


def test_a_flat_group_counts_and_is_not_packed():
    flat = group([member([row([5], [1, 2])], 1.0, number=i) for i in range(2)])
    mixed = group([member([row([6], [1, 2])], float(i), number=i) for i in range(2)], draw=1)
    trainables = normalised(rows_of([flat, mixed]), Normaliser.TOKEN_MEAN)
    assert len(trainables) == 4
    (micro,) = pack(trainables, budget=100)
    assert [tree.root for tree in micro.trees] == [(6, 1)]
    assert sum(t.weight for t in micro.targets) == pytest.approx(0.5)


def test_a_flat_group_is_packed_where_a_kl_needs_it():
    flat = group([member([row([5], [1, 2])], 1.0, number=i) for i in range(2)])
    (micro,) = pack(rows_of([flat], keep_flat=True), budget=100)
    assert len(micro.targets) == 4


def test_an_attempt_of_two_rows_is_one_sequence_BR_18():
    turns = [row([1] * 10, [2] * 6), row([1] * 12, [3] * 5)]
    members = [member(turns, 1.0), member([row([1] * 10, [4])], 0.0, number=1)]
    trainables = normalised(rows_of([group(members)]), Normaliser.SEQUENCE_MEAN)
    micros = pack(trainables, budget=100)
    targets = [t for micro in micros for t in micro.targets if t.advantage > 0]
    assert len(targets) == 11
    assert {t.weight for t in targets} == {1 / (2 * 11)}


def test_the_end_token_is_trained_though_it_is_the_padding_id_BR_13():
    """Nothing is padded and no id is compared with a padding id: what counts is the mask. The
    inputs are the four tokens that predict something trained (the attention mask of five, less the
    end token, which predicts nothing).
    """
    mask = [True, True, False, False, False]
    example = Example(row=row([11, 12, 13], [21, 2, 2, 2, 2], mask=mask))
    (micro,) = pack(from_examples([example]), budget=100)
    assert [(t.place, t.id) for t in micro.targets] == [(2, 21), (3, 2)]
    assert [p in {t.place for t in micro.targets} for p in range(7)] == [
        False, False, True, True, False, False, False,
    ]  # fmt: skip
    assert micro.ids_T == [11, 12, 13, 21]


def test_tool_output_is_seen_and_not_trained_BR_14():
    mask = [True] * 3 + [False] * 4 + [True] * 2
    example = Example(row=row([5, 6], [1, 2, 3, 40, 41, 42, 43, 7, 8], mask=mask))
    (micro,) = pack(normalised(from_examples([example]), Normaliser.TOKEN_MEAN), budget=100)
    assert [t.id for t in micro.targets] == [1, 2, 3, 7, 8]
    assert {t.weight for t in micro.targets} == {1 / 5}
    assert micro.ids_T == [5, 6, 1, 2, 3, 40, 41, 42, 43, 7]


def test_examples_weigh_by_their_own_weight():
    examples = [
        Example(row=row([5], [1, 2]), weight=3.0),
        Example(row=row([6], [1])),
        Example(row=row([7], [1]), weight=0.0),
        Example(row=row([8], [1], mask=[False])),
    ]
    weighed = normalised(from_examples(examples), Normaliser.TOKEN_MEAN)
    assert [t.weight for t in weighed] == [3 / 7, 1 / 7]


def test_a_first_token_that_nothing_predicts_is_no_target():
    whole = row([], [4, 5, 6])
    (micro,) = pack(
        normalised(from_examples([Example(row=whole)]), Normaliser.TOKEN_MEAN), budget=9
    )
    assert [(t.place, t.id, t.weight) for t in micro.targets] == [(0, 5, 0.5), (1, 6, 0.5)]


def test_lined_up_keeps_the_order_of_the_rows():
    rows = [row([9, 9], [1, 2]), row([3], [4, 5, 6]), row([8], [7])]
    trainables = [Trainable(row=r, sequence=i) for i, r in enumerate(rows)]
    for budget in (1, 6, 100):
        ids = [t.id for micro in lined_up(trainables, budget=budget) for t in micro.targets]
        assert ids == [1, 2, 4, 5, 6, 7]
