"""BR-61: the order of a finite set is a function of the position, across epochs too. That a run
goes on where the data was is tested in `tests/loop/test_driver.py`.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import DomainError
from posttrain.core.task import Task
from posttrain.domains.domain import answer_task
from posttrain.domains.epochs import Epochs, set_key
from posttrain.domains.mixture import is_heldout


def prompts(count: int) -> list[Task]:
    return [
        answer_task(f"prompt {n}", domain="own.set", seed=n, level=0, answer="x")
        for n in range(count)
    ]


def order(tasks: list[Task], positions: range, *, root_seed: int = 5) -> list[int]:
    epochs = Epochs(tasks, root_seed=root_seed, heldout_share=1e-9)
    return [epochs.task(position).seed for position in positions]


def test_each_task_comes_once_an_epoch_and_epochs_differ() -> None:
    whole = order(prompts(10), range(20))
    assert sorted(whole[:10]) == sorted(whole[10:]) == list(range(10))
    assert whole[:10] != whole[10:]
    assert whole != order(prompts(10), range(20), root_seed=6)


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 9))
def test_the_order_from_any_position_on_is_the_rest_of_the_whole(
    size: int, position: int, seed: int
) -> None:
    whole = order(prompts(size), range(50), root_seed=seed)
    assert order(prompts(size), range(position, 50), root_seed=seed) == whole[position:]


def test_another_set_has_another_key_and_another_order() -> None:
    tasks = prompts(10)
    assert set_key(tasks) == set_key(prompts(10))
    assert len({set_key(some) for some in (tasks, tasks[:9], tasks[::-1])}) == 3
    assert order(tasks[:9], range(9)) != [seed for seed in order(tasks, range(10)) if seed != 9]


def test_what_is_held_out_or_written_twice_has_no_place() -> None:
    tasks = prompts(40)
    epochs = Epochs([*tasks, *tasks[:5]], root_seed=0, heldout_share=0.2)
    own = [task for task in tasks if not is_heldout(task, 0.2)]
    assert 20 < len(own) < 40
    seen = [epochs.task(position) for position in range(len(own))]
    assert {task.description for task in seen} == {task.description for task in own}
    with pytest.raises(DomainError, match="all 3 tasks of the set are held out"):
        Epochs(tasks[:3], root_seed=0, heldout_share=1.0)
