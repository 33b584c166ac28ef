from __future__ import annotations

import statistics
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.train.advantages import Baseline, advantages

REWARDS = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=12)


def as_float32(values):
    return [struct.unpack("f", struct.pack("f", value))[0] for value in values]


def test_an_equal_reward_group_is_exactly_zero_and_flat_BR_01():
    for divide in (False, True):
        for baseline in Baseline:
            judged = advantages([1.0] * 4, baseline=baseline, divide=divide)
            assert judged.values == (0.0, 0.0, 0.0, 0.0)
            assert judged.flat


def test_a_group_is_centred_on_its_own_mean_BR_01():
    judged = advantages([0.0, 0.0, 0.0, 1.0])
    assert judged.values == (-0.25, -0.25, -0.25, 0.75)
    assert not judged.flat


def test_division_is_by_the_sample_deviation_BR_01():
    judged = advantages([0.0, 0.0, 0.0, 1.0], divide=True)
    assert judged.values == pytest.approx((-0.5, -0.5, -0.5, 1.5), abs=5e-6)


@pytest.mark.parametrize("divide", [False, True])
def test_a_group_of_one_has_nothing_to_compare_with_BR_01(divide):
    assert advantages([0.3], divide=divide).values == (0.0,)
    assert advantages([0.3, None], divide=divide).values == (0.0, None)


@pytest.mark.parametrize("rewards", [[5.0001, 5.0003], [9.0001, 9.0003]])
def test_nearly_equal_rewards_keep_their_scale_BR_02(rewards):
    low, high = advantages(as_float32(rewards), divide=True, epsilon=1e-6).values
    assert low == pytest.approx(-0.702, rel=0.01)
    assert high == pytest.approx(0.702, rel=0.01)


def test_a_member_without_reward_is_left_out_of_the_baseline_BR_25():
    values = advantages([1.0, 0.0, None, 1.0]).values
    assert values[2] is None
    assert [values[0], values[1], values[3]] == pytest.approx([1 / 3, -2 / 3, 1 / 3])


def test_leave_one_out_compares_with_the_others():
    judged = advantages([1.0, 0.0, 0.5], baseline=Baseline.LEAVE_ONE_OUT)
    assert judged.values == pytest.approx((1 - 0.25, 0 - 0.75, 0.5 - 0.5))


def test_no_reward_at_all_is_flat():
    judged = advantages([None, None])
    assert judged.values == (None, None)
    assert judged.flat


def test_an_infinite_reward_is_refused():
    with pytest.raises(AssertionError, match="finite"):
        advantages([1.0, float("inf")])


@given(REWARDS, st.booleans(), st.sampled_from(Baseline))
def test_advantages_agree_with_a_second_formulation(rewards, divide, baseline):
    judged = advantages(rewards, divide=divide, baseline=baseline)
    known = [r for r in rewards if r is not None]
    assert [v is None for v in judged.values] == [r is None for r in rewards]
    assert judged.flat == (len(set(known)) < 2)
    if judged.flat:
        assert all(v == 0.0 for v in judged.values if v is not None)
        return
    for reward, value in zip(rewards, judged.values, strict=True):
        if reward is None:
            continue
        others = list(known)
        others.remove(reward)
        centre = statistics.fmean(known if baseline is Baseline.MEAN else others)
        scale = statistics.stdev(known) + 1e-6 if divide else 1.0
        assert value == pytest.approx((reward - centre) / scale, abs=1e-9, rel=1e-6)
