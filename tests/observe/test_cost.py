import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.observe.cost import Cost, TimeSplit, split_time

seconds = st.floats(0, 1e6)


@given(seconds, seconds, seconds, seconds, seconds)
def test_parts_are_not_negative_and_sum_to_the_wall_time(
    wall: float, generate: float, train: float, execute: float, verify: float
) -> None:
    split = split_time(wall, generate_s=generate, train_s=train, execute_s=execute, verify_s=verify)
    parts = (split.generate_s, split.execute_s, split.verify_s, split.train_s, split.idle_s)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(wall, rel=1e-9, abs=1e-9)
    if wall > 1e-3:
        assert sum(split.share().values()) == pytest.approx(1.0)


def test_waiting_is_given_to_what_was_waited_for() -> None:
    split = split_time(10, generate_s=4, train_s=3, execute_s=1, verify_s=0.5)
    assert split == TimeSplit(generate_s=4, train_s=3, execute_s=1, verify_s=0.5, idle_s=1.5)
    crowded = split_time(10, generate_s=4, train_s=3, execute_s=20, verify_s=10)
    assert (crowded.execute_s, crowded.verify_s, crowded.idle_s) == (2.0, 1.0, 0.0)
    assert TimeSplit().share() == dict.fromkeys(
        ("generate", "execute", "verify", "train", "idle"), 0.0
    )
    with pytest.raises(UsageError):
        split_time(1, generate_s=-1)


def test_a_price_is_claimed_only_where_one_is_known() -> None:
    time = TimeSplit(generate_s=900, idle_s=900)
    assert Cost(time=time, sampled_tokens=3600, price_per_hour=2.0).price == 1.0
    assert Cost(time=time).price is None
    assert Cost(time=time, sampled_tokens=3600).sampled_tokens_per_s == 2.0
    assert Cost(time=TimeSplit()).sampled_tokens_per_s == 0.0
