"""The run configuration from everything a person may have given: preset, file, `--set`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core.errors import UsageError, nearest

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
