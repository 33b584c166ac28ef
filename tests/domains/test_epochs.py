"""BR-61: a resume goes on exactly where the data was, across epochs too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.domains.epochs import Epochs

PROMPTS = [f"prompt {number}" for number in range(10)]


def steps(epochs: Epochs, start: int, *, batch: int = 2) -> list[tuple[int, ...]]:
    found = []
    position = start
    while taken := epochs.batch(position, batch):
        found.append(taken)
        position += len(taken)
    return found


def test_each_prompt_comes_once_an_epoch_and_epochs_differ() -> None:
    order = steps(Epochs(PROMPTS, root_seed=5, epochs=2), 0)
    assert len(order) == 10
    first, second = order[:5], order[5:]
    assert sorted(i for step in first for i in step) == list(range(10))
    assert sorted(i for step in second for i in step) == list(range(10))
    assert first != second


@pytest.mark.parametrize(("saved_step", "left"), [(3, 7), (5, 5), (10, 0)])
def test_resume_sees_exactly_the_rest_of_the_uninterrupted_run(saved_step: int, left: int) -> None:
    whole = steps(Epochs(PROMPTS, root_seed=5, epochs=2), 0)
    state = Epochs(PROMPTS, root_seed=5, epochs=2).state(2 * saved_step)
    fresh = Epochs(PROMPTS, root_seed=5, epochs=2)
    resumed = fresh.resume(state)
    assert resumed.warning == ""
    rest = steps(fresh, resumed.position)
    assert rest == whole[saved_step:]
    assert len(rest) == left


def test_a_second_save_after_a_resume_holds_the_live_position() -> None:
    epochs = Epochs(PROMPTS, root_seed=5, epochs=2)
    resumed = epochs.resume(epochs.state(6))
    assert epochs.state(resumed.position + 2)["position"] == 8


def test_a_changed_data_set_starts_at_0_with_a_warning() -> None:
    state = Epochs(PROMPTS, root_seed=5, epochs=2).state(6)
    other = Epochs(PROMPTS[:4], root_seed=5, epochs=2)
    resumed = other.resume(state)
    assert resumed.position == 0
    assert "data set changed" in resumed.warning
    assert sorted(other.batch(0, 4)) == [0, 1, 2, 3]


def test_the_end_is_an_end_and_nonsense_is_refused() -> None:
    epochs = Epochs(PROMPTS, root_seed=0, epochs=1)
    assert epochs.batch(10, 2) == ()
    assert len(epochs.batch(9, 4)) == 1
    with pytest.raises(IndexError, match="epochs are over"):
        epochs.index(10)
    with pytest.raises(UsageError, match="2 of which 1 are distinct"):
        Epochs(["a", "a"], root_seed=0, epochs=1)
    with pytest.raises(UsageError, match="at least one epoch"):
        Epochs(["a"], root_seed=0, epochs=0)


@given(size=st.integers(1, 30), epochs=st.integers(1, 4), seed=st.integers(0, 9))
def test_every_epoch_is_a_permutation(size: int, epochs: int, seed: int) -> None:
    order = Epochs([str(n) for n in range(size)], root_seed=seed, epochs=epochs)
    for epoch in range(epochs):
        seen = [order.index(epoch * size + place) for place in range(size)]
        assert sorted(seen) == list(range(size))
