"""Synchronous runs of one seed end with the same bits, disturbed or not, over the real parts.

In float32 the engine computes one request at a time here: the products of fewer than four rows have
other roundings than those of more, so that bits would depend on who arrived with whom. In bfloat16
they do not.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.engine import model as models
from posttrain.engine.packed import PackedDecoder
from posttrain.loop.settings import RunConfig
from tests.loop.scripted_run import Watching
from tests.loop.smoke_run import settings, trained

SPAWN = multiprocessing.get_context("spawn")
"""Torch has threads, which a fork would not take along."""

SMALL = (
    "sft.steps=2", "sft.examples_per_step=4", "rl.steps=5", "rl.prompts_per_step=3",
    "rl.group_size=4", "run.save_every=2", "evals.at=[]", "train.anchor_weight=0.1",
    'domains.anchor=[{name="toy.sort"}]', "domains.anchor_tasks=4",
)  # fmt: skip
ALONE = ("model.dtype=float32", "engine.max_batch=1")
TOGETHER = ("model.dtype=bfloat16",)


class KilledAt(Watching):
    """Ends this process with SIGKILL once a step has been told of."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def record(self, kind: str, data: Mapping[str, Any]) -> None:
        super().record(kind, data)
        if kind == "step" and data["step"] == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def live(directory: Path, chosen: RunConfig, step: int) -> None:
    trained(directory, chosen, KilledAt(step))


def bits(directory: Path) -> dict[str, str]:
    """Hashes of the last checkpoint's weights, masters, moments, anchor and random state."""
    manifest = json.loads((directory / "checkpoints/step-000007/manifest.json").read_text())
    files = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    return {name: found for name, found in files.items() if name.endswith(".safetensors")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    assert trained(directory, settings(*SMALL, *ALONE), Watching()).reason == "done"
    return bits(directory)


def test_a_killed_and_resumed_run_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    chosen = settings(*SMALL, *ALONE)
    process = SPAWN.Process(target=live, args=(tmp_path, chosen, 5))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    torch.rand(1)  # whatever a process has drawn before has no part in it
    watching = Watching()
    assert trained(tmp_path, chosen, watching, resume=True).reason == "done"
    assert [step["step"] for step in watching.of("step")] == [5, 6, 7]
    assert set(undisturbed) == {
        "model/model.safetensors", "optimizer.safetensors", "anchor.safetensors",
    }  # fmt: skip
    assert bits(tmp_path) == undisturbed


def test_bits_do_not_depend_on_how_many_work_side_by_side(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """Workers and verdicts decide in which order attempts come and go."""
    chosen = settings(*SMALL, *ALONE, "sandbox.workers=2", "sandbox.max_verifications=1")
    trained(tmp_path, chosen, Watching())
    assert bits(tmp_path) == undisturbed


def test_in_bfloat16_bits_do_not_depend_on_who_shares_a_batch(tmp_path: Path) -> None:
    if not PackedDecoder.suits(models.load(models.random_model(tmp_path), dtype=torch.bfloat16)):
        pytest.skip("this machine has no packed products in bfloat16")
    for name, batch in (("alone", 1), ("together", 64)):
        chosen = settings(*SMALL, *TOGETHER, f"engine.max_batch={batch}")
        trained(tmp_path / name, chosen, Watching())
    assert bits(tmp_path / "alone") == bits(tmp_path / "together")
