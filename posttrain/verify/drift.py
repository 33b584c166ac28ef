"""How far a rate has jumped: a beta-binomial reference that follows slowly, and a two-sided CUSUM.

A rise as slow as learning is followed by the reference; a jump outruns it and adds up. Not a judge
of guilt. The one thing that must stay true: the reference moves at most `MAX_RATE` per verdict, so
that a jump cannot pull it along faster than learning may.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Self

WARM_UP = 96
"""Verdicts of a level before anything is held against it: so long the reference follows freely."""
MEMORY = 60.0
"""Verdicts the reference looks back on (a decay constant)."""
MAX_RATE = 0.0008
"""Most the reference moves by in one verdict: 12 points in 150."""
JUMP = 0.2
"""The jump that is looked for, as a difference of rates."""
FLOOR = 0.05
"""Rates are kept this far from 0 and 1: no single verdict tells everything."""
PRIOR_GROUPS = 20.0
"""Groups that the first guess of the likeness weighs; it looks back on five times as many."""
LIKENESS, LEAST_LIKENESS, MOST_LIKENESS = 0.1, 0.02, 0.5
"""Correlation of two attempts at one task: the first guess, and its bounds."""


@dataclass(slots=True)
class Reference:
    """What is expected at one level: decayed counts over a uniform prior, and the slow rate."""

    passed: float = 1.0
    total: float = 2.0
    rate: float = 0.5
    seen: int = 0

    def follow(self, value: float, count: int) -> None:
        """Take in `count` verdicts that are worth `value` together."""
        keep = math.exp(-count / MEMORY)
        self.passed = self.passed * keep + value
        self.total = self.total * keep + count
        self.seen += count
        step = self.passed / self.total - self.rate
        most = 1.0 if self.seen <= WARM_UP else MAX_RATE * count
        self.rate += min(most, max(-most, step))


class Drift:
    """One rate, over all levels of a domain. `up` and `down` are the evidence, in nats."""

    def __init__(self) -> None:
        self.levels: dict[int, Reference] = {}
        self.up = 0.0
        self.down = 0.0
        self._alike = LIKENESS * PRIOR_GROUPS
        self._groups = PRIOR_GROUPS

    @property
    def likeness(self) -> float:
        """Correlation of two attempts at one task, as estimated."""
        return min(MOST_LIKENESS, max(LEAST_LIKENESS, self._alike / self._groups))

    def take(self, value: float, count: int, *, level: int = 0) -> None:
        """Take in one group: `count` verdicts worth `value` (0 … count) together."""
        reference = self.levels.setdefault(level, Reference())
        if reference.seen >= WARM_UP:
            rate = _inside(reference.rate)
            against = _log_likelihood(rate, self.likeness, value, count)
            higher, lower = _inside(rate + JUMP), _inside(rate - JUMP)
            up = self.up + _log_likelihood(higher, self.likeness, value, count) - against
            down = self.down + _log_likelihood(lower, self.likeness, value, count) - against
            self.up = max(0.0, up) if rate <= 1.0 - JUMP / 2 else 0.0  # else none is left to make
            self.down = max(0.0, down) if rate >= JUMP else 0.0
            self._compare(_inside(reference.passed / reference.total), value, count)
        reference.follow(value, count)

    def settle(self) -> None:
        """Take what is seen now for granted: the evidence is gone, the references are new."""
        self.up = self.down = 0.0
        self.levels.clear()

    def check(self) -> None:
        """Invariants."""
        assert min(self.up, self.down) >= 0.0
        for reference in self.levels.values():
            assert 0.0 <= reference.rate <= 1.0
            assert 0.0 <= reference.passed <= reference.total + 1e-9

    def save(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "levels": [[level, asdict(one)] for level, one in self.levels.items()],
            "up": self.up,
            "down": self.down,
            "alike": self._alike,
            "groups": self._groups,
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> Self:
        """From what `save` gave."""
        drift = cls()
        drift.levels = {int(level): Reference(**one) for level, one in data["levels"]}
        drift.up, drift.down = data["up"], data["down"]
        drift._alike, drift._groups = data["alike"], data["groups"]
        return drift

    def _compare(self, rate: float, value: float, count: int) -> None:
        """Learn the likeness from how far a group lies from the rate; the ends say nothing."""
        if count < 2 or not 0.05 <= rate <= 0.95:
            return
        excess = (value - count * rate) ** 2 / (count * rate * (1.0 - rate))
        keep = 1.0 - 1.0 / (5.0 * PRIOR_GROUPS)
        self._alike = self._alike * keep + (excess - 1.0) / (count - 1)
        self._groups = self._groups * keep + 1.0


def _log_likelihood(rate: float, likeness: float, value: float, count: int) -> float:
    """Beta-binomial log-likelihood, without the factor that is the same for every rate."""
    weight = 1.0 / likeness - 1.0
    passed, failed = rate * weight, (1.0 - rate) * weight
    log = math.lgamma
    return log(passed + value) - log(passed) + log(failed + count - value) - log(failed)


def _inside(rate: float) -> float:
    return min(1.0 - FLOOR, max(FLOOR, rate))
