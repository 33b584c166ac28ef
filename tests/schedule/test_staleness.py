import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import IllegalTransitionError, UsageError
from posttrain.schedule.staleness import Freshness, Lineage, Staleness


def at_version(version: int) -> Lineage:
    lineage = Lineage()
    for number in range(1, version + 1):
        lineage.publish(number, parent=number - 1)
    return lineage


def test_bound_three_at_version_ten_keeps_seven_and_drops_six() -> None:  # BR-64
    staleness = Staleness(at_version(10), bound=3)
    assert staleness.judge([7]) is Freshness.FRESH
    assert staleness.judge([6]) is Freshness.STALE


def test_waiting_counts_because_age_is_judged_at_the_version_that_trains() -> None:  # BR-64
    lineage = at_version(10)
    staleness = Staleness(lineage, bound=3)
    assert staleness.judge([7, 7]) is Freshness.FRESH
    lineage.publish(11, parent=10)
    assert lineage.age(7) == 4
    assert staleness.judge([7, 7]) is Freshness.STALE


def test_an_attempt_over_many_versions_is_judged_by_its_oldest_token() -> None:  # BR-64
    staleness = Staleness(at_version(10), bound=3)
    assert staleness.judge([6, 7, 8, 9]) is Freshness.STALE
    assert staleness.judge([9, 8, 7]) is Freshness.FRESH


def test_only_the_old_member_of_a_group_is_dropped() -> None:  # BR-64
    staleness = Staleness(at_version(10), bound=3)
    members = [[8], [7, 9], [6, 10], [10]]
    assert [staleness.judge(m) is Freshness.FRESH for m in members] == [True, True, False, True]


def test_bound_zero_is_this_version_alone_and_below_zero_is_refused() -> None:
    lineage = at_version(2)
    assert Staleness(lineage, bound=0).judge([2]) is Freshness.FRESH
    assert Staleness(lineage, bound=0).judge([1]) is Freshness.STALE
    with pytest.raises(UsageError, match="bound"):
        Staleness(lineage, bound=-1)


def test_tokens_sampled_by_nobody_have_no_age() -> None:
    assert Staleness(at_version(9), bound=0).judge([-1, -1]) is Freshness.FRESH
    assert Staleness(at_version(9), bound=0).judge([]) is Freshness.FRESH


def test_age_runs_along_the_lineage_after_going_back() -> None:
    lineage = at_version(15)
    staleness = Staleness(lineage, bound=1)
    lineage.rewind(10)
    assert lineage.next_version == 16
    assert staleness.judge([10]) is Freshness.FRESH
    assert staleness.judge([12]) is Freshness.ROLLED_BACK
    assert staleness.judge([10, 12]) is Freshness.ROLLED_BACK
    lineage.publish(16, parent=10)
    assert lineage.age(10) == 1
    assert lineage.age(15) is None
    assert staleness.judge([10]) is Freshness.FRESH
    assert staleness.judge([9]) is Freshness.STALE


def test_a_chain_cannot_be_broken() -> None:
    lineage = at_version(3)
    for version, parent in ((3, 2), (4, 2), (2, 3)):
        with pytest.raises(IllegalTransitionError):
            lineage.publish(version, parent=parent)
    lineage.rewind(1)
    with pytest.raises(IllegalTransitionError, match="cannot go back"):
        lineage.rewind(2)
    with pytest.raises(IllegalTransitionError):
        lineage.publish(2, parent=1)


@given(st.lists(st.integers(0, 30), max_size=40))
def test_age_equals_walking_the_parents(moves: list[int]) -> None:
    lineage = Lineage()
    parents: dict[int, int] = {}
    for move in moves:
        if move % 3 and move < lineage.current and lineage.age(move) is not None:
            lineage.rewind(move)
        else:
            version = lineage.next_version
            parents[version] = lineage.current
            lineage.publish(version, parent=lineage.current)
        lineage.check()
        ages, at, age = {lineage.current: 0}, lineage.current, 0
        while at in parents:
            at, age = parents[at], age + 1
            ages[at] = age
        for version in range(lineage.stats().highest + 1):
            assert lineage.age(version) == ages.get(version)
    assert lineage.stats().length == lineage.age(0) + 1  # type: ignore[operator]
