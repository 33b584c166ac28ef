"""`posttrain train`: a run from its configuration, or one that goes on, to its report.

The one thing that must stay true: whatever ends the run, the way to go on is printed; and what is
on disk is reported, unless a person did not want to wait for that either.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli import runs, sources, stopping
from posttrain.cli.config import File, Overrides, Preset
from posttrain.core.errors import PreflightError, RunError, UsageError

if TYPE_CHECKING:
    from posttrain.core.config import Resolved
    from posttrain.loop.driver import Ending
    from posttrain.loop.settings import RunConfig
    from posttrain.loop.wiring import Run

ADMITTED_PER_LEVEL = 2
"""Tasks of each level that a domain is examined on before it is trained on for the first time."""
ASKED = 2
"""How often a run is asked to end: after its step, then at once."""


def train(
    preset: Preset = None,
    config: File = None,
    overrides: Overrides = None,
    resume: Annotated[str | None, typer.Option(help="Go on with this run.")] = None,
    run: Annotated[str | None, typer.Option(help="Name of the new run.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Train on domains that are not admitted, too.")
    ] = False,
) -> None:
    """Train, evaluate and report. Ctrl-C ends after the step in progress; once more, at once."""
    warnings: list[str] = []
    if resume is None:
        folder, resolved = _begin(preset, config, overrides or (), run)
    elif preset or config or overrides or run or force:
        raise UsageError(
            "--resume goes on under the configuration the run was started with; it was given "
            "together with other options.",
            f"posttrain train --resume {resume}",
        )
    else:
        folder = runs.find(resume)
        resolved = sources.saved(folder)
    try:
        if resume is None:
            warnings = _admit(resolved.value, force=force)
        ending = _work(folder, resolved.value, resume=resume is not None, warnings=warnings)
        _conclude(folder, ending)
    except (PreflightError, UsageError):
        runs.forget(folder)
        raise
    except KeyboardInterrupt:
        runs.forget(folder)
        kept = f"to go on: {_go_on(folder)}" if folder.exists() else "nothing had begun"
        typer.echo(f"interrupted; {kept}")
        raise typer.Exit(stopping.INTERRUPTED) from None


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


def _admit(config: RunConfig, *, force: bool) -> list[str]:
    """Examine the domains that nobody examined as they are; warnings of those that are trained on
    all the same.

    Raises:
        UsageError: one is not admitted, and `force` is not given.
    """
    import asyncio

    from posttrain.cli import examination
    from posttrain.cli.domains import Doing

    async def refused() -> dict[str, str]:
        found, doing = {}, Doing(quiet=True)
        async for name, report in examination.examine(
            examination.each(config.domains.train),
            doing,
            config,
            per_level=ADMITTED_PER_LEVEL,
            known=True,
        ):
            if not report.admitted:
                found[name] = report.reasons[0]
        doing.clear()
        return found

    found = asyncio.run(refused())
    if not found or force:
        return [f"Domain {name} is not admitted: {why}" for name, why in found.items()]
    told = "; ".join(f"{name} ({why})" for name, why in found.items())
    raise UsageError(
        f"not admitted to training: {told}.",
        f"posttrain domains check {next(iter(found))} tells all; --force trains on it as it is",
    )


def _work(folder: Path, config: RunConfig, *, resume: bool, warnings: Sequence[str]) -> Ending:
    """Run it to its end under the display.

    Raises:
        KeyboardInterrupt: a person stopped it, and it could not be asked to end by itself.
    """
    typer.echo(f"run: {folder}")
    import asyncio

    from posttrain.cli import progress
    from posttrain.core.clock import RealClock
    from posttrain.loop import wiring

    clock = RealClock()
    steps = {"sft": config.sft.steps, "rl": config.rl.steps}
    watch = progress.Watch(clock, steps=steps, minutes=config.rl.minutes)
    with stopping.held(), runs.crash_file(folder), progress.display(watch, clock) as display:
        opening = wiring.open_run(
            config, folder, resume=resume, recorder=display, warnings=warnings
        )
        try:
            return asyncio.run(_train(opening))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _train(opening: AbstractAsyncContextManager[Run]) -> Ending:
    """Train under the ear of `stopping`: the run is asked to end, twice; where it has not begun, or
    will not, the work is cancelled.
    """
    import asyncio

    work, run, asked = asyncio.current_task(), None, 0
    assert work is not None, "a coroutine runs in a task"

    def interrupt() -> None:
        nonlocal asked
        asked += 1
        if run is None or asked > ASKED or not run.interrupt():
            work.cancel()

    with stopping.heard(interrupt):
        async with opening as run:
            return await run.train()


def _conclude(folder: Path, ending: Ending) -> None:
    """Table, report and the next step.

    Raises:
        RunError: the run failed.
        Exit: it was interrupted.
    """
    from posttrain.cli import results

    try:
        results.tell(folder)
    except PreflightError as error:  # what ended the run may be that nothing can be written
        typer.echo(error.message, err=True)
    if ending.failed:
        reason, advised, advice = ending.reason.removeprefix("failed: ").rpartition(" Next: ")
        if not advised:
            reason, advice = advice, "to go on"
        told = f"the run failed after {_place(ending)}: {reason}"
        raise RunError(told, f"{advice.rstrip('.')}: {_go_on(folder)}")
    if ending.reason != "done":
        typer.echo(f"{ending.reason} after {_place(ending)}; to go on: {_go_on(folder)}")
        raise typer.Exit(stopping.INTERRUPTED)


def _place(ending: Ending) -> str:
    """The last step, and what a resume makes again of it and of those before."""
    again = ending.step - ending.saved_step
    if not again:
        return f"step {ending.step}"
    saved = f"saved at step {ending.saved_step}" if ending.saved_step else "not saved yet"
    steps = "1 step" if again == 1 else f"{again} steps"
    return f"step {ending.step} ({saved}: {steps} will be made again)"


def _go_on(folder: Path) -> str:
    return f"posttrain train --resume {folder.name}"
