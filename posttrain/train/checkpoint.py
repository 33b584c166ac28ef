"""Checkpoints on disk: complete or absent, and checked before anything is taken over.

A checkpoint is a directory: `model/` (transformers' layout), `optimizer.safetensors`, maybe
`anchor.safetensors`, `state.json`, and `manifest.json` with the size and SHA-256 of all of these.
It is written beside its place, synced, and renamed. That of step 20 of a run lives at
`step-000020`; order is by step number, never by name or time of change. The one thing that must
stay true: whatever happens while one is written, earlier ones stay as they were, and the one saved
last is never removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from posttrain.core.errors import CheckpointError
from posttrain.core.task import Json

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
PREFIX = "step-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a checkpoint holds beside the model directory."""

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    """File stem → tensors: `optimizer`, and `anchor` where there is one."""
    state: Mapping[str, Json] = field(default_factory=dict)


def write(
    directory: Path, content: Content, *, save_model: Callable[[Path], None]
) -> Generator[None, None, None]:
    """Write a checkpoint at `directory`, replacing one of the same name only when the new one is
    complete. Yields between files, so that other work may run.

    Raises:
        CheckpointError: it could not be written; nothing at or beside `directory` changed.
    """
    work: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        aside = work / "new"
        save_model(aside / "model")
        yield
        for stem, tensors in content.tensors.items():
            save_file(
                {k: t.contiguous() for k, t in tensors.items()}, aside / f"{stem}.safetensors"
            )
            yield
        (aside / STATE).write_text(json.dumps(content.state, allow_nan=False), "utf-8")
        files = {}
        for path in sorted(p for p in aside.rglob("*") if p.is_file()):
            files[path.relative_to(aside).as_posix()] = _sealed(path)
            yield
        manifest = {"format": FORMAT, "files": files}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
        _sync(aside / MANIFEST)
        for folder in (aside, aside / "model"):
            _sync(folder)
        _replace(directory, work)
    except (OSError, SafetensorError) as error:
        reason = error.message if isinstance(error, CheckpointError) else error
        raise CheckpointError(
            f"{directory} could not be written ({reason}); earlier checkpoints are untouched.",
            "free space on that file system, then resume the run",
        ) from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


def read(directory: Path) -> Generator[None, None, Content]:
    """Read a checkpoint after checking every file against the manifest; yields between files.

    Raises:
        CheckpointError: incomplete, damaged, or of another format.
    """
    manifest = manifest_of(directory)
    for name, entry in manifest["files"].items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != entry["size"]:
            size = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
            raise _damaged(directory, f"{name}: wanted {entry['size']} bytes, found {size}")
        if _sha256(path) != entry["sha256"]:
            raise _damaged(directory, f"{name}: its SHA-256 is not the one in the manifest")
        yield
    tensors = {}
    for name in manifest["files"]:
        if name.endswith(".safetensors") and "/" not in name:
            tensors[name.removesuffix(".safetensors")] = load_file(directory / name)
            yield
    return Content(tensors=tensors, state=json.loads((directory / STATE).read_text("utf-8")))


def manifest_of(directory: Path) -> Mapping[str, Any]:
    """The manifest of a checkpoint, its files not checked.

    Raises:
        CheckpointError: there is none, or it is of another format.
    """
    try:
        manifest: Mapping[str, Any] = json.loads((directory / MANIFEST).read_text("utf-8"))
        known = manifest["format"] == FORMAT and isinstance(manifest["files"], dict)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(directory, f"no readable {MANIFEST} ({error})") from error
    if not known:
        raise _damaged(directory, f"format {manifest['format']!r}, wanted {FORMAT}")
    return manifest


def _damaged(directory: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{directory} is not a complete checkpoint: {what}.",
        "resume from an earlier checkpoint of the run",
    )


def _sealed(path: Path) -> dict[str, Json]:
    """Sync a file and describe it."""
    _sync(path)
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(directory: Path, work: Path) -> None:
    """Put `work/new` in its place; what is there is moved away first, and back if the new one
    cannot take its place.
    """
    if directory.exists():
        directory.rename(work / "old")
    try:
        (work / "new").rename(directory)
    except OSError:
        if (work / "old").exists():
            (work / "old").rename(directory)
        raise
    _sync(directory.parent)


# --- which may go -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatingCheckpoints:
    """The checkpoints of a run in a folder, of which the `keep` (1 or more) latest stay. Incomplete
    ones, and those of other runs, take no place.

    >>> RotatingCheckpoints(directory=Path("checkpoints"), run="demo", keep=2).place(20).as_posix()
    'checkpoints/step-000020'
    """

    directory: Path
    run: str
    keep: int

    def place(self, step: int) -> Path:
        """Where the checkpoint of a step belongs."""
        return self.directory / f"{PREFIX}{step:06d}"

    def saved(self) -> dict[int, Path]:
        """Complete checkpoints of the run, by step; files are there in the right size."""
        found = {
            int(number): path
            for path in self.directory.glob(f"{PREFIX}*")
            if (number := path.name.removeprefix(PREFIX)).isdecimal() and _run_of(path) == self.run
        }
        return dict(sorted(found.items()))

    def retire(self, step: int) -> None:
        """Remove all but the latest ones, and the one of `step`, which has just been saved."""
        for number, path in list(self.saved().items())[: -self.keep]:
            if number != step:
                aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=self.directory))
                path.rename(aside / "old")
                shutil.rmtree(aside, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what a killed process left half-written. Before the first save of this one."""
        for path in self.directory.glob(f".{PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)


def _run_of(path: Path) -> str | None:
    """The run a complete checkpoint belongs to; None where it is not complete."""
    try:
        files = manifest_of(path)["files"]
        if any((path / name).stat().st_size != entry["size"] for name, entry in files.items()):
            return None
        run: str = json.loads((path / STATE).read_text("utf-8"))["run"]
    except (CheckpointError, OSError, ValueError, KeyError):
        return None
    return run
