"""How many sandboxes of an environment will be asked for at once: the forecast a stock is sized by.

Pure. It knows nothing of what is in stock. The one thing that must stay true: an environment that
is not asked for any more is soon forecast none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PAUSE_S = 0.05
"""So long nothing replaces what was taken from a stock: starting it would slow the first commands
of those who took it.
"""
_FIRST_GUESS_S = 0.05
"""How long warming is taken to take before it was seen."""


@dataclass(slots=True, kw_only=True)
class Demand:
    """The most that asked within the time in which one is replaced: the stock that spares waiting.

    Those who ask are counted in windows of that length; a window counts once the next has begun, so
    what is asked for all at once and never again is not stocked. The highest count is kept and
    halves in `keep_s` seconds.

    >>> demand = Demand(keep_s=60.0)
    >>> for now_s in (0.0, 0.0, 0.0): demand.ask(now_s)
    >>> demand.expected(0.0)
    0
    >>> demand.ask(10.0)
    >>> demand.expected(10.0), demand.expected(69.0), demand.expected(70.0)
    (3, 2, 0)
    """

    keep_s: float
    """After so long without anybody asking none is expected."""
    last_s: float = -math.inf
    """When somebody asked last."""
    _warming_s: float = _FIRST_GUESS_S
    _began_s: float = -math.inf
    _count: int = 0
    _peak: float = 0.0
    _peak_s: float = 0.0

    def ask(self, now_s: float) -> None:
        """Somebody asks."""
        if now_s - self._began_s > PAUSE_S + self._warming_s:
            self._peak = max(float(self._count), self._level(now_s))
            self._peak_s = self._began_s = now_s
            self._count = 0
        self._count += 1
        self.last_s = now_s

    def warmed(self, duration_s: float) -> None:
        """One was warmed in so many seconds."""
        self._warming_s = (self._warming_s + duration_s) / 2

    def forget(self) -> None:
        """It cannot be made: nothing is to be started ahead until it was asked for anew."""
        self._peak, self._count = 0.0, 0

    def expected(self, now_s: float) -> int:
        """How many will ask at once."""
        return 0 if self.silent(now_s) else int(self._level(now_s) + 0.5)

    def silent(self, now_s: float) -> bool:
        """Whether nobody asked for long."""
        return now_s >= self.last_s + self.keep_s

    def _level(self, now_s: float) -> float:
        if not self._peak:
            return 0.0
        return float(self._peak * 0.5 ** ((now_s - self._peak_s) / self.keep_s))
