"""Handing updated weights on under a new version.

Not a copy of weights: each sink takes the trainer's current ones its own way. The one thing that
must stay true: version numbers only rise, after a rewind too, and each names its parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.core.ports import WeightSink


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A version and the one it was trained from."""

    version: int
    parent: int


class Publisher:
    """Numbers versions and tells every sink.

    `current` is the version whose weights the trainer holds, `newest` the highest number that was
    ever given out in this run.
    """

    def __init__(self, sinks: Sequence[WeightSink], *, current: int = 0, newest: int = 0) -> None:
        assert newest >= current, f"version {current} cannot be above the newest, {newest}"
        self._sinks = tuple(sinks)
        self._current, self._newest = current, newest

    @property
    def current(self) -> int:
        """The version whose weights the trainer holds."""
        return self._current

    async def publish(self) -> Lineage:
        """Hand the trainer's weights on under the next number."""
        lineage = Lineage(version=self._newest + 1, parent=self._current)
        for sink in self._sinks:
            await sink.publish(version=lineage.version, parent=lineage.parent)
        self._current = self._newest = lineage.version
        return lineage
