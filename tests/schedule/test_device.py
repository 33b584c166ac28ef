import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.core.ports import Work
from posttrain.schedule.device import EngineFirst

BOTH = frozenset({Work.ENGINE, Work.TRAIN})


def test_engine_goes_first_and_training_is_not_starved() -> None:
    policy = EngineFirst(max_engine_items=3)
    chosen = [policy.choose(BOTH) for _ in range(8)]
    assert chosen == [Work.ENGINE] * 3 + [Work.TRAIN] + [Work.ENGINE] * 3 + [Work.TRAIN]


def test_updates_go_before_everything() -> None:
    assert EngineFirst().choose(frozenset(Work)) is Work.UPDATE


def test_what_is_alone_ready_runs() -> None:
    policy = EngineFirst()
    for work in Work:
        assert policy.choose(frozenset({work})) is work
    assert policy.stats().engine == policy.stats().train == policy.stats().update == 1


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(UsageError):
        EngineFirst(max_engine_items=0)


@given(
    st.lists(st.frozensets(st.sampled_from(list(Work)), min_size=1), max_size=60),
    st.integers(1, 5),
)
def test_nothing_waits_longer_than_stated(ready: list[frozenset[Work]], bound: int) -> None:
    policy = EngineFirst(max_engine_items=bound)
    waited = 0
    for kinds in ready:
        chosen = policy.choose(kinds)
        assert chosen in kinds
        policy.check()
        passed = Work.TRAIN in kinds and chosen is Work.ENGINE
        waited = waited + 1 if passed else 0
        assert waited <= bound
