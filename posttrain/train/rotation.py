"""Which checkpoints of a run there are, and which may go.

Not a writer (`checkpoint`), and no resume: that goes by the run's ledger. A checkpoint of step 20
lives at `step-000020`; order is by step number, never by name or time of change. The one thing that
must stay true: only complete checkpoints of *this* run are looked at, so a foreign one takes no
place.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.errors import CheckpointError, UsageError
from posttrain.train.checkpoint import STATE, manifest_of

PREFIX = "step-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint."""

    step: int
    path: Path


def place(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step belongs.

    >>> place(Path("checkpoints"), 20).as_posix()
    'checkpoints/step-000020'
    """
    return checkpoints / f"{PREFIX}{step:06d}"


def saved(checkpoints: Path, *, run: str) -> list[Saved]:
    """Complete checkpoints of the run, by step; files are there in the right size."""
    found = []
    for path in checkpoints.glob(f"{PREFIX}*"):
        number = path.name.removeprefix(PREFIX)
        if number.isdecimal() and _is_complete(path) and _run_of(path) == run:
            found.append(Saved(step=int(number), path=path))
    return sorted(found, key=lambda entry: entry.step)


def rotate(
    checkpoints: Path, *, run: str, keep: int, pinned: frozenset[int] = frozenset()
) -> tuple[Path, ...]:
    """Remove all but the `keep` latest checkpoints of the run and the pinned steps. To be called
    after a save has succeeded. Returns what was removed.

    Raises:
        UsageError: `keep` is below 1.
    """
    if keep < 1:
        raise UsageError(
            f"keep = {keep} would leave nothing to resume from; at least 1 was wanted.",
            "set keep = 1 to hold only the latest checkpoint",
        )
    entries = saved(checkpoints, run=run)
    gone = [entry.path for entry in entries[:-keep] if entry.step not in pinned]
    for path in gone:
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=checkpoints))
        path.rename(aside / "old")
        shutil.rmtree(aside, ignore_errors=True)
    return tuple(gone)


def sweep(checkpoints: Path) -> None:
    """Remove what a killed process left half-written. Call it before the run's first save."""
    for path in checkpoints.glob(f".{PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _is_complete(path: Path) -> bool:
    try:
        files = manifest_of(path)["files"]
        return all((path / n).stat().st_size == entry["size"] for n, entry in files.items())
    except (CheckpointError, OSError):
        return False


def _run_of(path: Path) -> str | None:
    try:
        run: str = json.loads((path / STATE).read_text("utf-8"))["run"]
    except (OSError, ValueError, KeyError):
        return None
    return run
