"""Epochs over a finite set of tasks: a seeded shuffle an epoch, each task once in it.

The position is a plain number; what stands there is a function of it, so nothing is restored but
that number. The one thing that must stay true: after a resume at any position, the order goes on
exactly as without the interruption, and a changed set starts again at 0 and says so.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.core import seeds
from posttrain.core.errors import UsageError
from posttrain.core.task import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where to go on."""

    position: int
    warning: str = ""
    """Why it is not where the saved state was; '' where it is."""


class Epochs:
    """An order over a finite set, epoch after epoch."""

    def __init__(self, identities: Sequence[str], *, root_seed: int, epochs: int) -> None:
        """`identities` are the content keys of the set, in its own order.

        Raises:
            UsageError: the set is empty, has a member twice, or there are no epochs.
        """
        if not identities or len(set(identities)) != len(identities):
            raise UsageError(
                f"wanted a set of distinct tasks, got {len(identities)} "
                f"of which {len(set(identities))} are distinct."
            )
        if epochs < 1:
            raise UsageError(f"wanted at least one epoch, got {epochs}.")
        self.size = len(identities)
        self.epochs = epochs
        self.fingerprint = seeds.hex_key(*identities)
        self._root_seed = root_seed
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    @property
    def total(self) -> int:
        """Positions in all epochs together."""
        return self.size * self.epochs

    def index(self, position: int) -> int:
        """Which member of the set stands at a position (0 … total-1).

        Raises:
            IndexError: all epochs are over.
        """
        if not 0 <= position < self.total:
            raise IndexError(f"position {position} of {self.total}: the epochs are over")
        epoch, place = divmod(position, self.size)
        return self._order(epoch)[place]

    def batch(self, position: int, count: int) -> tuple[int, ...]:
        """Members at the next `count` positions; fewer at the very end, none when finished."""
        return tuple(self.index(at) for at in range(position, min(position + count, self.total)))

    def state(self, position: int) -> Mapping[str, Json]:
        """What a checkpoint keeps."""
        return {"position": position, "fingerprint": self.fingerprint}

    def resume(self, state: Mapping[str, Json]) -> Resumed:
        """Where a saved state goes on in this set."""
        if state["fingerprint"] == self.fingerprint:
            return Resumed(position=int(state["position"]))
        return Resumed(
            position=0,
            warning=(
                f"the data set changed since the checkpoint (position {state['position']} of "
                f"another set); starting at its first task, of {self.size}."
            ),
        )

    def _shuffled(self, epoch: int) -> tuple[int, ...]:
        order = list(range(self.size))
        seeds.stream(self._root_seed, "epoch", self.fingerprint, epoch).shuffle(order)
        return tuple(order)
