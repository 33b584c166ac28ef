"""Ctrl-C over the real command line and the real parts, at moments of every kind."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import main, progress
from tests.loop.scripted_run import Watching

Said = tuple[int, str]
SMALL = (
    "sft.steps=2", "sft.examples_per_step=4", "rl.steps=4", "rl.prompts_per_step=2",
    "rl.group_size=4", "evals.tasks=2", "engine.max_batch=1",
)  # fmt: skip


class Pressing(Watching):
    """A display that presses Ctrl-C `times` when it is told something for the first time."""

    def __init__(self, told: Callable[[str, Mapping[str, Any]], bool], times: int) -> None:
        super().__init__()
        self.told = told
        self.times = times

    def __enter__(self) -> Pressing:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def record(self, kind: str, data: Mapping[str, Any]) -> None:
        super().record(kind, data)
        if self.times and self.told(kind, data):
            times, self.times = self.times, 0
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)


def collecting_after(step: int) -> Callable[[str, Mapping[str, Any]], bool]:
    """The first attempt of the step behind it has ended."""
    done = [-1]

    def told(kind: str, data: Mapping[str, Any]) -> bool:
        done.append(data.get("step", done[-1]))
        return done[-1] == step and "attempts since" in data.get("message", "")

    return told


def evaluating(point: str) -> Callable[[str, Mapping[str, Any]], bool]:
    return lambda kind, data: data.get("message") == f"evaluating ({point})"


@pytest.fixture
def train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, Watching]]:
    """Runs `posttrain train` under a display: exit code, what was said, what was shown."""
    monkeypatch.setenv("POSTTRAIN_RUNS", str(tmp_path))

    def call(*arguments: str, pressing: Any = None, times: int = 1) -> tuple[int, str, Watching]:
        display = Pressing(pressing or (lambda kind, data: False), times)
        monkeypatch.setattr(progress, "display", lambda watch, clock: display)
        code = main.run(["train", *arguments])
        told = capsys.readouterr()
        assert "Traceback" not in told.out + told.err
        return code, told.out + told.err, display

    return call


def new(name: str, *more: str) -> list[str]:
    chosen = [f"--set={setting}" for setting in (*SMALL, *more)]
    return ["--preset", "smoke", "--run", name, *chosen]


def bits(folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / "checkpoints/step-000006/manifest.json").read_text())
    return {n: e["sha256"] for n, e in manifest["files"].items() if n.endswith(".safetensors")}


def steps(display: Watching) -> list[int]:
    return [data["step"] for data in display.of("step")]


def test_interrupted_at_every_kind_of_moment_it_goes_on_to_the_same_end(
    tmp_path: Path, train: Callable[..., tuple[int, str, Watching]]
) -> None:
    go_on = ("--resume", "cut")
    code, said, display = train(*new("cut"), pressing=evaluating("base"))
    assert (code, steps(display)) == (130, [])
    assert "interrupted after step 0; to go on: posttrain train --resume cut" in said
    assert "leaving the evaluation" in display.of("notice")[0]["message"]

    code, said, display = train(*go_on, pressing=collecting_after(1))
    assert (code, steps(display)) == (130, [1, 2])
    assert (tmp_path / "cut/checkpoints/step-000002").exists()
    assert "interrupted after step 2" in said
    assert "finishing the step, then saving" in display.of("notice")[-1]["message"]

    code, said, display = train(*go_on, pressing=collecting_after(4), times=2)
    assert (code, steps(display)) == (130, [3, 4])
    assert "report: " in said
    assert (
        "interrupted after step 4 (saved at step 2: 2 steps will be made again); to go on: "
        "posttrain train --resume cut" in said
    )
    assert not (tmp_path / "cut/checkpoints/step-000004").exists()  # at once: nothing is saved

    code, said, display = train(*go_on, pressing=evaluating("rl"))
    assert (code, steps(display)) == (130, [3, 4, 5, 6])
    assert "interrupted after step 6" in said
    code, said, display = train(*go_on)
    assert (code, steps(display)) == (0, [])
    assert [data["point"] for data in display.of("eval")] == ["rl"]

    assert train(*new("whole"))[0] == 0
    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")


def test_stopped_before_it_began_it_leaves_nothing(
    tmp_path: Path, train: Callable[..., tuple[int, str, Watching]], monkeypatch: Any
) -> None:
    from posttrain.loop import wiring

    load = wiring.load_model

    def pressed(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return load(*arguments)

    monkeypatch.setattr(wiring, "load_model", pressed)
    code, said, _ = train(*new("never"))
    assert code == 130
    assert "interrupted; nothing had begun" in said
    assert not (tmp_path / "never").exists()


def test_while_its_anchor_is_made_it_ends_at_the_first_signal_and_can_go_on(
    tmp_path: Path, train: Callable[..., tuple[int, str, Watching]], monkeypatch: Any
) -> None:
    """Nobody was there to be asked yet, and Ctrl-C did nothing, however often."""
    from posttrain.loop import wiring

    make = wiring.anchor_rows

    async def pressed(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return await make(*arguments, **options)

    monkeypatch.setattr(wiring, "anchor_rows", pressed)
    anchor = ('domains.anchor=[{name="toy.sort"}]', "domains.anchor_tasks=2")
    code, said, _ = train(*new("held", "train.anchor_weight=0.1", "evals.at=[]", *anchor))
    assert code == 130
    assert "interrupted; to go on: posttrain train --resume held" in said
    monkeypatch.setattr(wiring, "anchor_rows", make)
    code, _, display = train("--resume", "held")
    assert (code, steps(display)) == (0, [1, 2, 3, 4, 5, 6])
