"""Evaluations on disk, so that one policy is evaluated on one suite once.

Not a data base: one JSON file an evaluation, named by the hash of (suite, weights, sampling), in a
folder that runs share. The one thing that must stay true: a file is complete or absent, and what
does not read back whole is computed again, never trusted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from posttrain.core import codec, seeds
from posttrain.core.trajectory import Sampling
from posttrain.evals.metrics import Evaluation
from posttrain.observe.blobs import write_whole

T = TypeVar("T")

FORMAT = 1
"""Changes with the meaning of what is stored; older files are then computed again."""


def key(*, suite: str, weights: str, sampling: Sampling) -> str:
    """Name of an evaluation: everything that can change its results."""
    drawn = json.dumps(codec.to_json(sampling), sort_keys=True)
    return seeds.hex_key("evaluation", FORMAT, suite, weights, drawn)


class Registry:
    """A folder of evaluations."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, *, suite: str, weights: str, sampling: Sampling) -> Evaluation | None:
        """The stored evaluation; None where there is none that reads back whole and fits."""
        found = read(self._path(suite, weights, sampling), Evaluation)
        fits = found and (found.suite, found.weights, found.sampling) == (suite, weights, sampling)
        return found if fits else None

    def put(self, evaluation: Evaluation) -> Path:
        """Store it; returns the file's path.

        Raises:
            OSError: the folder cannot be written.
        """
        path = self._path(evaluation.suite, evaluation.weights, evaluation.sampling)
        return write(path, evaluation)

    def _path(self, suite: str, weights: str, sampling: Sampling) -> Path:
        return self._folder / f"{key(suite=suite, weights=weights, sampling=sampling)}.json"


def read(path: Path, kind: type[T]) -> T | None:
    """What a file holds; None where it does not read back whole."""
    try:
        return codec.from_json(kind, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write(path: Path, what: object) -> Path:
    """Write it aside first and rename it then; returns the path.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(codec.to_json(what), allow_nan=False)
    write_whole(path, text.encode())
    return path
