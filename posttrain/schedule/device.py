"""What the one compute thread does next.

Not a scheduler of requests: it sees only kinds of work that are ready. The one thing that must
stay true: none of them waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.errors import UsageError
from posttrain.core.ports import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStats:
    """How often each kind was chosen."""

    engine: int
    train: int
    update: int


class EngineFirst:
    """Weight updates at once, then the engine, and a training item at least every
    `max_engine_items` engine items that it waited for.

    Engine first keeps environments busy (what they wait for is the next token); the bound keeps
    training going while generation never pauses, as it does in the asynchronous mode. An engine
    item (one decoding step) is some ten times shorter than a training item (one micro-batch), so
    the default of 8 halves the time between them.
    """

    def __init__(self, *, max_engine_items: int = 8) -> None:
        if max_engine_items < 1:
            raise UsageError(f"wanted max_engine_items of 1 or more, got {max_engine_items}.")
        self._max_engine_items = max_engine_items
        self._passed_over = 0
        self._chosen = dict.fromkeys(Work, 0)

    def choose(self, ready: frozenset[Work]) -> Work:
        """One of `ready` (never empty)."""
        assert ready, "the compute thread asks only when something is ready"
        chosen = self._choose(ready)
        waits = chosen is Work.ENGINE and Work.TRAIN in ready
        self._passed_over = self._passed_over + 1 if waits else 0
        self._chosen[chosen] += 1
        return chosen

    def check(self) -> None:
        """Invariant: training was passed over at most `max_engine_items` times in a row."""
        assert 0 <= self._passed_over <= self._max_engine_items

    def stats(self) -> DeviceStats:
        """How often each kind was chosen."""
        return DeviceStats(
            engine=self._chosen[Work.ENGINE],
            train=self._chosen[Work.TRAIN],
            update=self._chosen[Work.UPDATE],
        )

    def _choose(self, ready: frozenset[Work]) -> Work:
        if Work.UPDATE in ready:
            return Work.UPDATE
        if Work.TRAIN in ready and self._passed_over >= self._max_engine_items:
            return Work.TRAIN
        return Work.ENGINE if Work.ENGINE in ready else Work.TRAIN
