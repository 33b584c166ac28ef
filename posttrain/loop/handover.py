"""The embedded engine beneath a trainer: new weights and their version change in one work item.

The trainer's update is in place, so between it and a later `publish` the engine would sample with
new weights under the old version. The one thing that must stay true: no token is sampled in
between, so its version is always that of the weights that sampled it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from posttrain.core.ports import Work
from posttrain.engine.embedded import EmbeddedEngine

T = TypeVar("T")


class TrainedEngine(EmbeddedEngine):
    """An engine whose `train` slot aliases the parameters of a trainer that runs on its thread."""

    _announced: tuple[int, int] | None = None

    @contextmanager
    def handing_over(self, version: int, parent: int) -> Iterator[None]:
        """An update that runs on the thread inside makes `version`, as part of its last work item.
        An update that fails, or none, makes nothing.
        """
        self._announced = (version, parent)
        try:
            yield
        finally:
            self._announced = None

    async def run(self, kind: Work, items: Generator[None, None, T]) -> T:
        """See `Device`."""
        if kind is Work.UPDATE and self._announced is not None:
            items = self._handed_over(items, *self._announced)
            self._announced = None
        return await super().run(kind, items)

    async def publish(self, *, version: int, parent: int) -> None:
        """See `WeightSink`; nothing is left to do where the update brought the version along."""
        if self.stats().versions["train"] != version:
            await super().publish(version=version, parent=parent)

    def _handed_over(
        self, items: Generator[None, None, T], version: int, parent: int
    ) -> Generator[None, None, T]:
        result = yield from items
        yield from self.publication(version, parent)
        return result
