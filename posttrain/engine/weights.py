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
from posttrain.engine.packed import PackedDecoder

TRAIN = "train"


@dataclass(slots=True)
class Slot:
    """One set of weights that requests can name."""

    model: AnyDecoder
    version: int

    def refresh(self) -> None:
        """Make the model compute with what its storage holds now."""
        if isinstance(self.model, PackedDecoder):
            self.model.refresh()


class Weights:
    """The slots of one engine. `model` is the skeleton that aliases the trainer's parameters."""

    def __init__(self, model: AnyDecoder, *, version: int = 0) -> None:
        self._trained = model
        self._slots = {TRAIN: Slot(_fast(model), version)}
        self._parents: dict[int, int] = {}
        self._touched = False

    @property
    def lineage(self) -> Mapping[int, int]:
        """Published version → its parent."""
        return dict(self._parents)

    @property
    def versions(self) -> Mapping[str, int]:
        """Slot → the version it holds."""
        return {name: slot.version for name, slot in self._slots.items()}

    def touch(self) -> None:
        """The trainer's parameters may have changed."""
        self._touched = True

    def settle(self) -> None:
        """Called before a step: what was touched is made ready to compute with."""
        if self._touched:
            self._slots[TRAIN].refresh()
            self._touched = False

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
        self.touch()

    @torch.no_grad()
    def pin(self, name: str) -> int:
        """Copy the trainer's current version to another slot; returns that version."""
        assert name != TRAIN, "the slot 'train' always holds the newest version"
        version = self._slots[TRAIN].version
        if name in self._slots:
            pinned = self._slots[name]
            sources = self._trained.parameters()
            for target, source in zip(pinned.model.parameters(), sources, strict=True):
                target.copy_(source)
            pinned.version = version
            pinned.refresh()
        else:
            self._slots[name] = Slot(_fast(self._trained.copy()), version)
        return version


def _fast(model: AnyDecoder) -> AnyDecoder:
    return PackedDecoder(model) if PackedDecoder.suits(model) else model
