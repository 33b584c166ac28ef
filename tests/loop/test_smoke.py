"""The preset `smoke` over the real parts: model, engine, trainer, workers, verifier, ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from posttrain.core import events
from posttrain.core.errors import ConfigError, LedgerError, PreflightError, UsageError
from posttrain.loop import wiring
from posttrain.loop.driver import Ending
from posttrain.loop.past import fold
from posttrain.loop.settings import RunConfig
from posttrain.observe.journal import read_notes
from posttrain.observe.ledger import read_events
from tests.loop.scripted_run import Watching
from tests.loop.smoke_run import PRESETS, settings


async def trained(
    directory: Path, chosen: RunConfig, *, resume: bool = False, stop_at: int | None = None
) -> tuple[Ending, Watching]:
    class Stopping(Watching):
        def record(self, kind: str, data: Any) -> None:
            super().record(kind, data)
            if kind == "step" and data["step"] == stop_at:
                run.interrupt()

    watching = Stopping()
    async with wiring.open_run(chosen, directory, resume=resume, recorder=watching) as run:
        return await run.train(), watching


def mean_reward(steps: list[Any]) -> float:
    rewards = [step["domains"]["toy.digit"]["reward"] for step in steps]
    return sum(rewards) / len(rewards)


def test_checkpoints_without_their_ledger_are_not_trained_over(tmp_path: Path) -> None:
    """An emptied ledger made `--resume` begin anew in the folder of the trained run."""
    (tmp_path / "checkpoints/step-000004").mkdir(parents=True)
    with pytest.raises(LedgerError, match="is empty, though there are checkpoints"):
        asyncio.run(trained(tmp_path, settings(), resume=True))


def test_the_reward_of_a_toy_task_rises(tmp_path: Path) -> None:
    directory = tmp_path / "smoke"
    ending, watching = asyncio.run(trained(directory, settings()))
    assert ending.reason == "done"
    steps = [step for step in watching.of("step") if step["phase"] == "rl"]
    assert len(steps) == 40
    assert mean_reward(steps[-8:]) > mean_reward(steps[:8]) + 0.15
    assert [data["point"] for data in watching.of("eval")] == ["base", "sft", "rl"]
    past = fold(read_events(directory / "ledger.jsonl"))
    past.account.check()
    stats = past.account.stats()
    assert stats.entered == stats.trained == 12 * 16 + 40 * 8 * 8
    notes = list(read_notes(directory / "journal", kind="step"))
    for note in notes:
        assert all(seconds >= 0 for seconds in note.data["seconds"].values())


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, staleness: int) -> None:
    chosen = settings(
        "sft.steps=2", "rl.steps=4", "rl.prompts_per_step=2", "rl.group_size=4", "evals.tasks=2",
        f"rl.max_staleness={staleness}", 'evals.at=["base", "rl"]',
    )  # fmt: skip
    directory = tmp_path / "run"
    ending, _ = asyncio.run(trained(directory, chosen, stop_at=4))
    assert (ending.reason, ending.step) == ("interrupted", 4)
    killed = directory / "checkpoints/.step-000005-x"  # a save that SIGKILL cut off
    killed.mkdir()
    ending, watching = asyncio.run(trained(directory, chosen, resume=True))
    assert (ending.reason, ending.step) == ("done", 6)
    assert [step["step"] for step in watching.of("step")] == [5, 6]
    assert not killed.exists()
    assert [data["point"] for data in watching.of("eval")] == ["rl"]
    past = fold(read_events(directory / "ledger.jsonl"))
    past.account.check()
    assert past.account.stats().pending == 0
    versions = [
        event.version for event in read_events(directory / "ledger.jsonl")
        if isinstance(event, events.Published)
    ]  # fmt: skip
    assert versions == sorted(set(versions))


def test_an_anchor_holds_and_a_checkpoint_brings_it_along(tmp_path: Path) -> None:
    chosen = settings(
        "sft.steps=1", "rl.steps=1", "rl.prompts_per_step=2", "rl.group_size=4", "evals.at=[]",
        "train.anchor_weight=0.1", 'domains.anchor=[{name="toy.sort"}]', "domains.anchor_tasks=4",
    )  # fmt: skip
    directory = tmp_path / "run"
    ending, watching = asyncio.run(trained(directory, chosen, stop_at=1))
    assert ending.reason == "interrupted"
    assert watching.of("step")[0]["metrics"]["anchor_kl"] == pytest.approx(0.0, abs=1e-4)
    ending, _ = asyncio.run(trained(directory, chosen, resume=True))
    assert ending.reason == "done"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("domains.train=[]", "domains.train names no domain"),
        ('domains.watch=[{name="toy.digit"}]', "in domains.train and in domains.watch"),
        ('sft.weights={"toy.digi"=1.0}', "did you mean 'toy.digit'"),
        ("train.anchor_weight=0.1", "domains.anchor names no domain"),
    ],
)
def test_settings_that_contradict_one_another_stop_before_any_work(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        asyncio.run(trained(tmp_path / "run", settings(override)))


def test_a_folder_that_holds_a_run_is_not_begun_again(tmp_path: Path) -> None:
    chosen = settings("sft.steps=0", "rl.steps=0", "evals.at=[]")
    assert asyncio.run(trained(tmp_path / "run", chosen))[0].reason == "done"
    with pytest.raises(UsageError, match="holds a run already"):
        asyncio.run(trained(tmp_path / "run", chosen))


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_every_preset_fits_the_settings(preset: str) -> None:
    chosen = settings(preset=preset)
    assert chosen.run.name == preset
    assert wiring.plan_of(chosen).phases[1].steps == chosen.rl.steps


def test_a_model_cut_off_in_the_middle_is_made_again_and_never_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk its configuration was there without its weights, and no resume could begin."""
    from posttrain.engine import model as models

    chosen = settings("sft.steps=0", "rl.steps=0", "evals.at=[]")
    make = models.random_model

    def cut(directory: Path, **options: Any) -> None:
        make(directory, **options)
        (directory / "model.safetensors").unlink()
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(models, "random_model", cut)
    with pytest.raises(PreflightError, match="cannot be written: I/O error: No space left"):
        asyncio.run(trained(tmp_path, chosen))
    assert not (tmp_path / "model").exists()
    (tmp_path / ".model-killed").mkdir()
    monkeypatch.setattr(models, "random_model", make)
    assert asyncio.run(trained(tmp_path, chosen))[0].reason == "done"
    assert not list(tmp_path.glob(".model*"))
