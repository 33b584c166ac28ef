"""Where runs lie on disk, and how a person names one.

The one thing that must stay true: a name that matches nothing is refused with the nearest one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.core.errors import (
    LedgerError,
    PosttrainError,
    PreflightError,
    UsageError,
    nearest,
)


def root() -> Path:
    """The folder of all runs: `$POSTTRAIN_RUNS` or `runs`."""
    return Path(os.environ.get("POSTTRAIN_RUNS") or "runs")


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return (folder / "ledger.jsonl").is_file() or (folder / "config.toml").is_file()


def find(name: str) -> Path:
    """The folder of an existing run, by its name or its path.

    Raises:
        UsageError: there is no such run.
    """
    for folder in (root() / name, Path(name)):
        if is_run(folder):
            return folder
    known = sorted(path.name for path in root().glob("*") if is_run(path))
    listed = f" (runs: {', '.join(known[:10])})" if known else ""
    raise UsageError(
        f"there is no run '{name}' under {root()}/{nearest(name, known)}{listed}.",
        "give the name of a folder under runs/, or a path to one.",
    )


def check_name(name: str) -> None:
    """Refuse a name that is not the name of one folder under `root()`.

    Raises:
        UsageError: it is empty, a path, or starts with a dot or a dash.
    """
    if not name.strip() or name[0] in ".-" or "/" in name or "\0" in name:
        raise UsageError(
            f"wanted a plain name for the run, got {name!r}.",
            "give a word such as 'first'; POSTTRAIN_RUNS sets the folder of all runs.",
        )


def fresh(name: str) -> Path:
    """The folder of a new run: `name`, or `name-2`, `name-3`, … where that is taken."""
    folder, number = root() / name, 2
    while folder.exists():
        folder, number = root() / f"{name}-{number}", number + 1
    return folder


def forget(folder: Path) -> None:
    """Remove the folder of a run that never began: its ledger is empty, and nothing but what is
    laid out before the first event is in it.
    """
    ledger = folder / "ledger.jsonl"
    began = ledger.exists() and ledger.stat().st_size > 0
    laid_out = {"config.toml", "ledger.jsonl", "model"}
    if not began and {path.name for path in folder.iterdir()} <= laid_out:
        shutil.rmtree(folder)


@contextmanager
def crash_file(folder: Path) -> Iterator[None]:
    """Keep the traceback of what goes wrong inside in `error.txt` of the run folder. Mistakes of
    a person, lacks of the machine and a ledger that cannot be had (another process writes it) are
    told in full anyway and leave none.
    """
    try:
        yield
    except (UsageError, PreflightError, LedgerError):
        raise
    except Exception as error:
        import traceback

        path = folder / "error.txt"
        try:
            path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        except OSError:
            if not isinstance(error, PosttrainError):  # else it tells all there is to know
                error.add_note(f"The traceback could not be written to {path}.")
        else:
            error.add_note(f"The traceback is in {path}.")
        raise
