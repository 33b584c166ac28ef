"""`posttrain train`: a run from its configuration, or one that goes on, to its report.

The one thing that must stay true: whatever ends the run, what is on disk is reported, and the way
to go on is printed.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli import runs, sources
from posttrain.cli.config import File, Overrides, Preset
from posttrain.core.errors import PreflightError, RunError, UsageError

if TYPE_CHECKING:
    from posttrain.cli.progress import Display
    from posttrain.core.config import Resolved
    from posttrain.loop.driver import Ending
    from posttrain.loop.settings import RunConfig


def train(
    preset: Preset = None,
    config: File = None,
    overrides: Overrides = None,
    resume: Annotated[str | None, typer.Option(help="Go on with this run.")] = None,
    run: Annotated[str | None, typer.Option(help="Name of the new run.")] = None,
) -> None:
    """Train, evaluate and report. Ctrl-C ends after the step in progress; once more, at once."""
    if resume is None:
        folder, resolved = _begin(preset, config, overrides or (), run)
    elif preset or config or overrides or run:
        raise UsageError(
            "--resume goes on under the configuration the run was started with; it was given "
            "together with other options.",
            f"posttrain train --resume {resume}",
        )
    else:
        folder = runs.find(resume)
        resolved = sources.saved(folder)
    try:
        ending = _work(folder, resolved.value, resume=resume is not None)
    except (PreflightError, UsageError):
        runs.forget(folder)
        raise
    _conclude(folder, ending)


def _begin(
    preset: str | None, config: Path | None, overrides: Sequence[str], run: str | None
) -> tuple[Path, Resolved[RunConfig]]:
    """The new run's folder, made, with its resolved configuration written into it."""
    if preset is None and config is None and not overrides:
        raise UsageError(
            f"train wants a --preset ({', '.join(sources.presets())}), a --config file, or --set.",
            "posttrain train --preset smoke",
        )
    if run is not None:
        runs.check_name(run)
        if (runs.root() / run).exists():
            raise UsageError(
                f"there is a run '{run}' already.",
                f"posttrain train --resume {run}, or another --run",
            )
    return sources.begin(preset, config, overrides, name=run)


def _work(folder: Path, config: RunConfig, *, resume: bool) -> Ending:
    """Run it to its end under the display."""
    import asyncio

    from posttrain.cli import progress
    from posttrain.core.clock import RealClock

    clock = RealClock()
    steps = {"sft": config.sft.steps, "rl": config.rl.steps}
    watch = progress.Watch(clock, steps=steps, minutes=config.rl.minutes)
    typer.echo(f"run: {folder}")
    with runs.crash_file(folder), progress.display(watch, clock) as display:
        return asyncio.run(_train(folder, config, resume=resume, display=display))


async def _train(folder: Path, config: RunConfig, *, resume: bool, display: Display) -> Ending:
    import asyncio

    from posttrain.loop import wiring

    async with wiring.open_run(config, folder, resume=resume, recorder=display) as run:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, run.interrupt)
        try:
            return await run.train()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def _conclude(folder: Path, ending: Ending) -> None:
    """Table, report and the next step.

    Raises:
        RunError: the run failed.
    """
    from posttrain.cli import results
    from posttrain.evals import report

    try:
        page = report.write(folder)
        results.show(report.load(folder).outcomes)
        typer.echo(f"report: {page}")
    except OSError as error:  # what ended the run may be that nothing can be written
        typer.echo(f"No report: {error}.", err=True)
    go_on = f"posttrain train --resume {folder.name}"
    if ending.failed:
        reason = ending.reason.removeprefix("failed: ")
        raise RunError(f"the run failed after step {ending.step}: {reason}", go_on)
    if ending.reason != "done":
        typer.echo(f"{ending.reason} after step {ending.step}; to go on: {go_on}")
