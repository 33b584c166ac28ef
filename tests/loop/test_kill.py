"""`kill -9` at everything that reaches the disk: nothing is lost, nothing is trained twice."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from posttrain.core import events
from posttrain.loop.past import fold
from posttrain.observe.ledger import read_events
from tests.loop.scripted_run import Fuse, World

FORK = multiprocessing.get_context("fork")
SIGKILLED = -9
STEPS = 3
"""Of RL, behind one supervised step; a checkpoint falls between them."""


def _live(directory: Path, staleness: int, fuse: int) -> None:
    World(directory, staleness=staleness, steps=STEPS, fuse=Fuse(fuse)).run()


def run_until_killed(directory: Path, *, staleness: int, fuse: int) -> bool:
    """Run in a process of its own; True where the fuse killed it, False where it came to an end."""
    process = FORK.Process(target=_live, args=(directory, staleness, fuse))
    process.start()
    process.join()
    assert process.exitcode in (0, SIGKILLED)
    return process.exitcode == SIGKILLED


def check_the_account(directory: Path) -> None:
    past = fold(read_events(directory / "ledger.jsonl"))
    past.account.check()
    stats = past.account.stats()
    assert stats.pending == 0
    assert stats.entered == stats.trained + sum(stats.dropped.values())
    assert all(draw.size == len(past.statuses(number)) for number, draw in past.draws.items())
    assert None not in {s for number in past.draws for s in past.statuses(number).values()}


def trained_draws(directory: Path) -> dict[int, list[int]]:
    """Draws of each step along the surviving lineage."""
    steps: dict[int, list[int]] = {}
    draws: dict[str, int] = {}
    for event in read_events(directory / "ledger.jsonl"):
        if isinstance(event, events.Entered):
            draws[event.key] = event.draw
        elif isinstance(event, events.Trained):
            steps[event.step] = sorted({draws[key] for key in event.keys})
        elif isinstance(event, events.Rewound):
            steps = {step: found for step, found in steps.items() if step <= event.step}
    return steps


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[World, dict[int, list[int]], int]:
    directory = tmp_path_factory.mktemp("undisturbed")
    fuse = Fuse(0)
    world = World(directory, steps=STEPS, fuse=fuse)
    world.run()
    return world, trained_draws(directory), fuse.passed


def test_killed_at_every_point_and_resumed_it_ends_with_the_same_weights(
    tmp_path: Path, undisturbed: tuple[World, dict[int, list[int]], int]
) -> None:
    whole, draws, points = undisturbed
    assert points > 80
    for point in range(1, points + 1):
        directory = tmp_path / str(point)
        assert run_until_killed(directory, staleness=0, fuse=point)
        world = World(directory, steps=STEPS)
        assert world.run().reason == "done"
        assert world.model.weights == whole.model.weights, f"killed at point {point}"
        assert trained_draws(directory) == draws
        check_the_account(directory)


@pytest.mark.parametrize("staleness", [0, 1])
def test_killed_again_and_again_it_still_comes_to_the_right_end(
    tmp_path: Path, staleness: int, undisturbed: tuple[World, dict[int, list[int]], int]
) -> None:
    directory = tmp_path / "run"
    kills = 0
    while run_until_killed(directory, staleness=staleness, fuse=23 + 7 * (kills % 9)):
        kills += 1
        assert kills < 60, "no headway between kills"
    assert kills >= 2
    check_the_account(directory)
    assert sorted(trained_draws(directory)) == [1, 2, 3, 4]
    if staleness == 0:
        world = World(directory, steps=STEPS)
        world.run()
        assert world.model.weights == undisturbed[0].model.weights


def test_an_asynchronous_run_killed_at_many_points_keeps_account_and_bound(tmp_path: Path) -> None:
    for point in range(3, 100, 7):
        directory = tmp_path / str(point)
        run_until_killed(directory, staleness=1, fuse=point)
        world = World(directory, steps=STEPS, staleness=1)
        assert world.run().reason == "done"
        assert world.model.max_age <= 1
        assert sorted(trained_draws(directory)) == [1, 2, 3, 4]
        check_the_account(directory)
