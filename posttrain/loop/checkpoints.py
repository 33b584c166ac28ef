"""Where a run's checkpoints lie and which of them go, over `train.rotation`.

The one thing that must stay true: the checkpoint that the ledger named last is never removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from posttrain.train import rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatingCheckpoints:
    """`loop.parts.Checkpoints` over `train.rotation`."""

    directory: Path
    run: str
    keep: int

    def place(self, step: int) -> Path:
        """Where the checkpoint of a step belongs."""
        return rotation.place(self.directory, step)

    def sweep(self) -> None:
        """Remove what a killed process left half-written. Before the first save of this one."""
        rotation.sweep(self.directory)

    def retire(self, step: int) -> None:
        """Keep the latest ones, and the one of `step` whatever lies about beside it."""
        rotation.rotate(self.directory, run=self.run, keep=self.keep, pinned=frozenset({step}))
