"""The run configuration from everything a person may have given: preset, file, `--set`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli import runs
from posttrain.core.errors import PreflightError, UsageError, nearest

if TYPE_CHECKING:
    from posttrain.core.config import Resolved
    from posttrain.loop.settings import RunConfig


def presets() -> dict[str, Path]:
    """The presets that come with posttrain, by name."""
    import posttrain.loop

    folder = Path(posttrain.loop.__file__).parent / "presets"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def resolve(preset: str | None, file: Path | None, overrides: Sequence[str]) -> Resolved[RunConfig]:
    """The resolved configuration.

    Raises:
        UsageError: there is no such preset.
        ConfigError: a key or a value does not fit.
    """
    from posttrain.core import config
    from posttrain.loop.settings import RunConfig

    known = presets()
    if preset is not None and preset not in known:
        raise UsageError(
            f"there is no preset '{preset}'{nearest(preset, known)} (presets: {', '.join(known)}).",
            "posttrain config show --preset NAME shows what one holds.",
        )
    return config.load(
        RunConfig,
        preset=known[preset] if preset else None,
        file=file,
        environment=os.environ,
        overrides=overrides,
    )


def saved(folder: Path) -> Resolved[RunConfig]:
    """The configuration a run was started with.

    Raises:
        ConfigError: it is not there or no longer fits.
    """
    from posttrain.core import config
    from posttrain.loop.settings import RunConfig

    return config.load(RunConfig, file=folder / "config.toml")


def begin(
    preset: str | None, file: Path | None, overrides: Sequence[str], *, name: str | None = None
) -> tuple[Path, Resolved[RunConfig]]:
    """The folder of a new run, made, with its resolved configuration written into it. The run is
    named after its folder: `name`, else `run.name`, with a number where that is taken.

    Raises:
        UsageError: the configuration does not fit.
        PreflightError: the folder cannot be written.
    """
    overrides = [*overrides, f"run.name={name}"] if name else list(overrides)
    resolved = resolve(preset, file, overrides)
    runs.check_name(resolved.value.run.name)
    folder = runs.fresh(resolved.value.run.name)
    if folder.name != resolved.value.run.name:
        others = [each for each in overrides if each.partition("=")[0].strip() != "run.name"]
        resolved = resolve(preset, file, [*others, f"run.name={folder.name}"])
    try:
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(resolved.dump(), encoding="utf-8")
    except OSError as error:
        raise PreflightError(
            f"the run folder {folder} cannot be written: {error.strerror or error}.",
            "free space or permissions there, or set POSTTRAIN_RUNS to another folder.",
        ) from error
    return folder, resolved
