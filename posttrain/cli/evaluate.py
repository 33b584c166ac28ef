"""`posttrain eval`: held-out evaluation of a run's latest weights, or of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli import runs, sources
from posttrain.cli.config import File, Overrides, Preset
from posttrain.core.errors import PosttrainError, PreflightError, UsageError

if TYPE_CHECKING:
    from posttrain.core.config import Resolved
    from posttrain.loop.settings import RunConfig


def evaluate(
    target: Annotated[str, typer.Argument(help="A run, a checkpoint, or a model.")],
    preset: Preset = None,
    config: File = None,
    overrides: Overrides = None,
) -> None:
    """Evaluate on held-out tasks: a run's latest weights, or one of its checkpoint folders, on its
    own domains, or a model on the domains of a preset or file.
    """
    if _is_run(target):
        if preset or config or overrides:
            raise UsageError(
                f"'{target}' is a run and is evaluated under its own configuration.",
                f"posttrain eval {target}",
            )
        folder = runs.find(target)
        resolved = sources.saved(folder)
        point = "rl" if resolved.value.rl.steps else "sft"
        _work(folder, resolved.value, point=point, trained=True)
    else:
        folder, resolved = _of_model(target, preset, config, overrides or [])
        try:
            _work(folder, resolved.value, point="base", trained=False)
        except (PreflightError, UsageError):
            runs.forget(folder)
            raise


def _is_run(name: str) -> bool:
    return runs.is_run(runs.root() / name) or runs.is_run(Path(name))


def _checkpoint(path: Path) -> Path | None:
    """The checkpoint that a path names, by its folder or by the `model` folder in it."""
    folder = path.parent if path.name == "model" else path
    return folder if (folder / "manifest.json").is_file() else None


def _of_model(
    model: str, preset: str | None, config: Path | None, overrides: list[str]
) -> tuple[Path, Resolved[RunConfig]]:
    """A folder for the evaluation of a model, which must be there. The weights of a checkpoint are
    evaluated as its run is, unless a preset or file says otherwise.
    """
    from posttrain.engine import models

    name = f"eval-{Path(model).name}"
    if checkpoint := _checkpoint(Path(model)):
        run = checkpoint.resolve().parent.parent
        model, name = str(checkpoint / "model"), f"eval-{run.name}-{checkpoint.name}"
        if preset is None and config is None and (run / "config.toml").is_file():
            config = run / "config.toml"
    try:
        models.resolve(model)
    except PosttrainError as error:
        error.add_note(f"There is no run '{model}' under {runs.root()}/ either.")
        raise
    if preset is None and config is None:
        raise UsageError(
            "the evaluation of a model wants domains: --preset or --config.",
            f"posttrain eval {model} --preset demo",
        )
    own = [f"model.name={model}", "sft.steps=0", "rl.steps=0"]
    return sources.begin(preset, config, [*overrides, *own], name=name)


def _work(folder: Path, config: RunConfig, *, point: str, trained: bool) -> None:
    import asyncio

    from posttrain.cli import progress, results
    from posttrain.core.clock import RealClock
    from posttrain.loop import wiring

    clock = RealClock()
    watch = progress.Watch(clock, steps={}, minutes=None)

    async def run(display: progress.Display) -> None:
        async with wiring.open_run(config, folder, resume=True, recorder=display) as opened:
            if trained:
                await opened.restore()
            await opened.evaluate(point)

    with runs.crash_file(folder), progress.display(watch, clock) as display:
        asyncio.run(run(display))
    results.tell(folder)
