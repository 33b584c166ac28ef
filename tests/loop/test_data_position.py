"""The position in the data over the scripted run: a task set through epochs, stops and changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.core import events
from posttrain.core.events import Drawn, LedgerEvent, Trained
from posttrain.domains.catalogue import DomainSpec
from posttrain.domains.mixture import Mixture
from posttrain.domains.supply import Supply
from posttrain.loop.drawing import SupplyTasks
from posttrain.observe.ledger import read_events
from tests.domains.inprocess import InProcess
from tests.loop.scripted_run import World


def together(steps: Sequence[Sequence[str]]) -> list[str]:
    return sorted(prompt for step in steps for prompt in step)


def finite(directory: Path, prompts: int, **fields: Any) -> World:
    """A run over a task set of so many prompts, none of them held out; a set of another size has
    other prompts.
    """
    text = 'name = "own.set"\n'
    for number in range(prompts):
        text += (
            f'[[tasks]]\nobjective = "prompt {number} of {prompts}"\noracle = {{ answer = "a" }}\n'
            'checks = [{ kind = "exact", params = { answer = "a" } }]\n'
        )
    file = directory.with_name(f"{directory.name}-{prompts}.toml")
    file.write_text(text)
    supply = Supply(InProcess(), heldout_share=1e-9)
    found = asyncio.run(supply.keys([DomainSpec(name=str(file))]))
    return World(
        directory, sft_steps=0, steps=10, save_every=1, points=frozenset(),
        source=Mixture(found, root_seed=3), tasks=SupplyTasks(supply, found, root_seed=3),
        **fields,
    )  # fmt: skip


def stopped_after(world: World, step: int | None) -> World:
    """The world after a run that was interrupted in a step; None: after a run to its end."""

    def interrupt(event: LedgerEvent) -> None:
        if isinstance(event, Trained) and event.step == step and world.driver:
            world.driver.interrupt()

    world.on_append = interrupt
    assert world.run().reason == ("interrupted" if step else "done")
    return world


@pytest.mark.parametrize(
    "delay", [lambda draw: 1, lambda draw: 1 + 5 * (draw % 2)], ids=["in turn", "out of turn"]
)
def test_each_prompt_comes_once_an_epoch_wherever_the_run_was_stopped(
    tmp_path: Path, delay: Callable[[int], int]
) -> None:
    """BR-61: 10 prompts, batch 2, 2 epochs; stopped after steps 3, 5 and 10. A resume at an epoch's
    end made no step, and the shuffle began anew.
    """
    undisturbed = stopped_after(finite(tmp_path / "whole", 10), None)
    steps = undisturbed.model.prompts
    everything = sorted(f"prompt {number} of 10" for number in range(10))
    assert together(steps[:5]) == together(steps[5:]) == everything
    assert steps[:5] != steps[5:]
    seen: list[list[str]] = []
    for stop in (3, 5, 10, None):
        world = stopped_after(finite(tmp_path / "parts", 10, delay=delay), stop)
        seen += world.model.prompts
        newest = tmp_path / f"parts/checkpoints/step-{len(seen):06d}/state.json"
        assert json.loads(newest.read_text())["extra"]["next_draw"] == 2 * len(seen)
        drawn = [
            event
            for event in read_events(tmp_path / "parts/ledger.jsonl")
            if isinstance(event, events.Drawn)
        ]
        assert [event.place for event in drawn] == list(range(2 * len(seen)))
        assert world.watching.of("warning") == []
    assert seen == steps
    assert world.model.prompts == []  # at step 10 it says finished
    assert world.model.weights == undisturbed.model.weights  # sampled tokens too are the same


def test_a_changed_set_of_prompts_begins_at_its_first_and_says_so(tmp_path: Path) -> None:
    """BR-61: as many rows as were used of the old set were skipped in the new one, silently."""
    fresh = stopped_after(finite(tmp_path / "fresh", 4), None)
    stopped_after(finite(tmp_path / "run", 10), 3)
    world = stopped_after(finite(tmp_path / "run", 4), None)
    (warning,) = world.watching.of("warning")
    assert "tasks of own.set, level 0, are not those the run drew from before" in warning["message"]
    assert len(world.model.prompts) == 7
    assert world.model.prompts == fresh.model.prompts[:7]
    assert together(world.model.prompts[:2]) == [f"prompt {n} of 4" for n in range(4)]


def test_no_task_asks_for_more_context_than_the_model_has() -> None:
    """A long reference solution went into the trainer whole, whatever the model could take."""
    supply = Supply(InProcess())
    keys = asyncio.run(supply.keys([DomainSpec(name="toy.copy", levels=(0,))]))
    drawn = Drawn(draw=0, domain="toy.copy", level=0, seed=0, size=1, phase="sft")

    def most(**limit: int) -> int:
        tasks = SupplyTasks(supply, keys, root_seed=3, **limit)
        return asyncio.run(tasks.task(drawn)).limits.max_context_tokens

    assert most(max_context_tokens=64) == 64
    assert most() == most(max_context_tokens=1 << 40) > 64


def test_a_task_set_has_its_oracles_where_the_model_has_less_context(tmp_path: Path) -> None:
    """Supervised training on a task set ended at once under a model of less than 4096 tokens."""
    (tmp_path / "own.toml").write_text(
        'name = "own.set"\n[[tasks]]\nobjective = "Say a."\noracle = { answer = "a" }\n'
        'checks = [{ kind = "exact", params = { answer = "a" } }]\n'
    )
    supply = Supply(InProcess(), heldout_share=1e-9)
    keys = asyncio.run(supply.keys([DomainSpec(name=str(tmp_path / "own.toml"))]))
    tasks = SupplyTasks(supply, keys, root_seed=3, max_context_tokens=2048)
    drawn = Drawn(draw=86, domain="own.set", level=0, seed=86, size=1, phase="sft", place=5)
    task = asyncio.run(tasks.task(drawn))
    assert task.limits.max_context_tokens == 2048
    assert asyncio.run(tasks.oracle(task)).turns[0].text == "a"
