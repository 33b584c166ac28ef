"""Real and manual clocks behind one protocol (`core.ports.Clock`).

Everything that reads time is given a clock, so that no test sleeps. `ManualClock` never moves by
itself: it is advanced, or jumps to the earliest sleeper when `auto_jump` is on and nothing else is
ready. The one thing that must stay true: `now_s` is monotonic.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time


class RealClock:
    """Monotonic seconds for durations, wall seconds for records."""

    def now_s(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    async def sleep(self, duration_s: float) -> None:
        """Sleep for a duration in seconds."""
        await asyncio.sleep(duration_s)


class ManualClock:
    """A clock for tests: time moves only when told to.

    >>> clock = ManualClock()
    >>> clock.advance(2.5); clock.now_s()
    2.5
    """

    def __init__(self, *, start_s: float = 0.0, auto_jump: bool = False) -> None:
        self._now_s = start_s
        self._auto_jump = auto_jump
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now_s(self) -> float:
        """Current manual time in seconds."""
        return self._now_s

    def wall_s(self) -> float:
        """Same as `now_s`: a manual clock has one time line."""
        return self._now_s

    def advance(self, duration_s: float) -> None:
        """Move time forward and wake every sleeper whose time has come."""
        assert duration_s >= 0, f"a clock is monotonic; advance by {duration_s} was asked"
        self._now_s += duration_s
        while self._sleepers and self._sleepers[0][0] <= self._now_s:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)

    async def sleep(self, duration_s: float) -> None:
        """Wait until the manual time has passed `now + duration_s`."""
        if duration_s <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + duration_s, next(self._order), future))
        if self._auto_jump:
            asyncio.get_running_loop().call_soon(self._jump, 3)
        await future

    def _jump(self, patience: int) -> None:
        """Jump to the earliest sleeper after `patience` idle turns of the event loop."""
        if patience:
            asyncio.get_running_loop().call_soon(self._jump, patience - 1)
            return
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)  # cancelled: nobody waits for that time
        if self._sleepers:
            self.advance(max(0.0, self._sleepers[0][0] - self._now_s))
