"""Weight slots and versions.

The slot `train` aliases the trainer's parameters; every other slot (`eval`, `serve`) holds its own
copy of a published version. It neither trains nor schedules: it is called between work items of
the compute thread. The one thing that must stay true: versions only grow, and each has one parent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from posttrain.core.errors import EngineError
from posttrain.engine.model import AnyDecoder

TRAIN = "train"


@dataclass(slots=True)
class Slot:
    """One set of weights that requests can name."""

    model: AnyDecoder
    version: int


class Weights:
    """The slots of one engine. `model` is the skeleton that aliases the trainer's parameters."""

    def __init__(self, model: AnyDecoder, *, version: int = 0) -> None:
        self._slots = {TRAIN: Slot(model, version)}
        self._parents: dict[int, int] = {}

    @property
    def lineage(self) -> Mapping[int, int]:
        """Published version → its parent."""
        return dict(self._parents)

    @property
    def versions(self) -> Mapping[str, int]:
        """Slot → the version it holds."""
        return {name: slot.version for name, slot in self._slots.items()}

    def slot(self, name: str) -> Slot:
        """The slot of a request.

        Raises:
            EngineError: nothing was put there.
        """
        if name not in self._slots:
            raise EngineError(
                f"the weight slot '{name}' is empty (filled: {', '.join(self._slots)}).",
                f"pin a published version to '{name}' first",
            )
        return self._slots[name]

    def publish(self, *, version: int, parent: int) -> None:
        """What the trainer's parameters hold now is `version`.

        Raises:
            EngineError: the version does not grow, or its parent was never held.
        """
        train = self._slots[TRAIN]
        if version <= train.version:
            raise EngineError(f"version {version} was published after {train.version}.")
        if parent not in self._parents and parent > train.version:
            raise EngineError(f"version {version} names a parent {parent} that never was.")
        self._parents[version] = parent
        train.version = version

    @torch.no_grad()
    def pin(self, name: str) -> int:
        """Copy the trainer's current version to another slot; returns that version."""
        assert name != TRAIN, "the slot 'train' always holds the newest version"
        train = self._slots[TRAIN]
        if name in self._slots:
            kept = self._slots[name].model.parameters()
            for target, source in zip(kept, train.model.parameters(), strict=True):
                target.copy_(source)
            self._slots[name].version = train.version
        else:
            self._slots[name] = Slot(train.model.copy(), train.version)
        return train.version
