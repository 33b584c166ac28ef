"""Whether a rate has jumped: filters over the pass rate of a domain, and surges of marks of wins.

The filter is a hidden Markov model (Rabiner 1989, section III) whose states are a pass rate and
what it does: it stays, it rises as fast as honest learning may, or it has just jumped up or down.
So a rise that learning explains is no evidence, whatever came before it. Not a judge of guilt. The
one thing that must stay true: work and memory per group do not grow with what was seen.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from enum import Enum
from operator import mul
from typing import Any, Self

STEEPEST = 0.0005
"""Most that honest learning adds to a pass rate per verdict: 7.5 points in 150."""
POINTS = 30
"""Pass rates that are told apart."""
JUMPS = (3, 4, 6, 8)
"""Jumps that are looked for, in points: by 10 to 27 % of all attempts."""
JUMP_EVERY = 100_000.0
"""Verdicts between two jumps of one domain, as expected beforehand."""
RISE_EVERY, RISE_LASTS, JUMP_LASTS = 2000.0, 400.0, 400.0
"""Verdicts between two rises; that a rise lasts; after which a jump is the new normal."""
WANDER = 0.001
"""Chance per verdict that a rate moves to a neighbour by itself."""
LIKENESS, LEAST_LIKENESS, MOST_LIKENESS = 0.1, 0.02, 0.5
"""Correlation of two attempts at one task: the first guess, and its bounds."""
PRIOR_GROUPS = 20.0
"""Groups that the first guess of the likeness weighs; it looks back on five times as many."""
FIRST_WINS = 20
"""Wins before a mark can be more frequent than usual."""
MEMORY = 200.0
"""Wins that the usual share of a mark looks back on (a decay constant)."""
SELDOM = 0.01
"""Share of wins that honest ones may mark at any time, whatever the past says."""
COMMON = 0.75
"""Share of wins above which a mark tells nothing."""
RISE = 0.1
"""Rise of the pass rate in training from which held-out tasks are expected to show it."""
SHARE = 0.25
"""Share of the unmarked wins that a surge is taken to mark."""

RATES = tuple((point + 0.5) / POINTS for point in range(POINTS))


class Course(Enum):
    """What a pass rate does."""

    STEADY = "steady"
    RISING = "rising"
    JUMPED = "jumped"
    FALLEN = "fallen"


class Filter:
    """What is believed of the pass rate at one level: a probability for each course and rate."""

    def __init__(self) -> None:
        self.belief = {course: [0.0] * POINTS for course in Course}
        self.belief[Course.STEADY] = [0.8 / POINTS] * POINTS
        self.belief[Course.RISING] = [0.2 / POINTS] * POINTS

    @property
    def rate(self) -> float:
        """The expected pass rate."""
        return sum(math.fsum(map(mul, row, RATES)) for row in self.belief.values())

    @property
    def variance(self) -> float:
        """Of what is believed about the pass rate."""
        squares = [rate * rate for rate in RATES]
        return sum(math.fsum(map(mul, row, squares)) for row in self.belief.values()) - self.rate**2

    def evidence(self, course: Course) -> float:
        """Nats by which a jump is likelier than it was beforehand, against all else."""
        has, prior = math.fsum(self.belief[course]), JUMP_LASTS / JUMP_EVERY
        return math.log(max(has, 1e-300) / max(1.0 - has, 1e-15) / prior)

    def take(self, value: float, count: int, likeness: float) -> None:
        """Take in one group: `count` verdicts worth `value` together."""
        likely = _likelihoods(round(likeness, 2), value, count)
        moved = {course: list(map(mul, row, likely)) for course, row in self._moved(count).items()}
        total = math.fsum(map(math.fsum, moved.values()))
        self.belief = {course: [one / total for one in row] for course, row in moved.items()}

    def _moved(self, count: int) -> dict[Course, list[float]]:
        """What is believed `count` verdicts on, before they are seen."""
        steady, rising, jumped, fallen = self.belief.values()
        begin, end = _chance(count / RISE_EVERY), _chance(count / RISE_LASTS)
        jump, over = _chance(count / JUMP_EVERY), _chance(count / JUMP_LASTS)
        stay, climb = 1.0 - 2.0 * jump, min(1.0, STEEPEST * count * POINTS)
        fresh = [(s + r) * jump / len(JUMPS) for s, r in zip(steady, rising, strict=True)]
        rows = (
            [
                (s * (1.0 - begin) + r * end) * stay + (j + f) * over
                for s, r, j, f in zip(steady, rising, jumped, fallen, strict=True)
            ],
            _risen([(s * begin + r * (1.0 - end)) * stay
                    for s, r in zip(steady, rising, strict=True)], climb),
            [j * (1.0 - over) + more for j, more in zip(jumped, _jumped(fresh), strict=True)],
            [f * (1.0 - over) + more
             for f, more in zip(fallen, _jumped(fresh[::-1])[::-1], strict=True)],
        )  # fmt: skip
        wander = min(1.0, WANDER * count)
        return {course: _spread(row, wander) for course, row in zip(Course, rows, strict=True)}


class Drift:
    """The pass rate of a domain, over all its levels. `up` and `down` are evidence, in nats."""

    def __init__(self) -> None:
        self.levels: dict[int, Filter] = {}
        self._alike = LIKENESS * PRIOR_GROUPS
        self._groups = PRIOR_GROUPS

    @property
    def up(self) -> float:
        """For a jump up."""
        return self._evidence(Course.JUMPED)

    @property
    def down(self) -> float:
        """For a jump down."""
        return self._evidence(Course.FALLEN)

    @property
    def rate(self) -> float:
        """Mean of the expected pass rates of its levels."""
        return math.fsum(one.rate for one in self.levels.values()) / max(1, len(self.levels))

    @property
    def variance(self) -> float:
        """Of what is believed about `rate`."""
        return (
            math.fsum(one.variance for one in self.levels.values()) / max(1, len(self.levels)) ** 2
        )

    @property
    def likeness(self) -> float:
        """Correlation of two attempts at one task, as estimated."""
        return min(MOST_LIKENESS, max(LEAST_LIKENESS, self._alike / self._groups))

    def take(self, value: float, count: int, *, level: int = 0) -> None:
        """Take in one group: `count` verdicts worth `value` (0 … count) together."""
        own = self.levels.setdefault(level, Filter())
        own.take(value, count, self.likeness)
        self._compare(own.rate, value, count)

    def settle(self) -> None:
        """Forget what is known of the rates, so that what comes is the new normal."""
        self.levels.clear()

    def check(self) -> None:
        """Invariants."""
        for one in self.levels.values():
            assert min(map(min, one.belief.values())) >= 0.0
            assert abs(sum(map(sum, one.belief.values())) - 1.0) < 1e-9

    def save(self) -> dict[str, Any]:
        """As plain data."""
        levels = [[level, list(one.belief.values())] for level, one in self.levels.items()]
        return {"levels": levels, "alike": self._alike, "groups": self._groups}

    @classmethod
    def load(cls, data: dict[str, Any]) -> Self:
        """From what `save` gave."""
        drift = cls()
        for level, belief in data["levels"]:
            drift.levels[int(level)] = own = Filter()
            own.belief = dict(zip(Course, belief, strict=True))
        drift._alike, drift._groups = data["alike"], data["groups"]
        return drift

    def _evidence(self, course: Course) -> float:
        """Of the level where it is strongest: what one level said long ago adds nothing to it."""
        return max((one.evidence(course) for one in self.levels.values()), default=0.0)

    def _compare(self, rate: float, value: float, count: int) -> None:
        """Learn the likeness from how far a group lies from the rate; the ends say nothing."""
        if count < 2 or not 0.05 <= rate <= 0.95:
            return
        excess = (value - count * rate) ** 2 / (count * rate * (1.0 - rate))
        keep = 1.0 - 1.0 / (5.0 * PRIOR_GROUPS)
        self._alike = self._alike * keep + (excess - 1.0) / (count - 1)
        self._groups = self._groups * keep + 1.0


@dataclass(slots=True)
class Surge:
    """How much oftener than usual wins bear a mark: a CUSUM over likelihood ratios. What is seen of
    a task is whether any of its wins does, for attempts at one task are no witnesses of their own.
    """

    marked: float = 0.5
    """Decayed count of marked wins, over a prior of half a win each way."""
    wins: float = 1.0
    up: float = 0.0
    """Evidence, in nats."""

    def take(self, marked: int, wins: int) -> None:
        """Take in so many wins at one task, and how many of them bear the mark."""
        usual = max(SELDOM, self.marked / self.wins)
        if usual > COMMON:
            self.up = 0.0
        elif self.wins >= FIRST_WINS:
            none, usually_none = ((1.0 - usual) * (1.0 - SHARE)) ** wins, (1.0 - usual) ** wins
            ratio = (1.0 - none) / (1.0 - usually_none) if marked else none / usually_none
            self.up = max(0.0, self.up + math.log(ratio))
        keep = math.exp(-wins / MEMORY)
        self.marked = 0.5 + (self.marked - 0.5) * keep + marked
        self.wins = 1.0 + (self.wins - 1.0) * keep + wins

    def save(self) -> dict[str, float]:
        """As plain data."""
        return asdict(self)


@dataclass(slots=True)
class Lag:
    """How far held-out tasks fall behind when training tasks are passed more often. A sampled
    policy may pass fewer tasks than a greedy one and catch up with it: only what it passes more,
    and did not where the rise began, is evidence.
    """

    trained: float = math.inf
    """Pass rate in training where the present rise began; inf: nothing was compared yet."""
    gap: float = 0.0
    """By how much it was above that of held-out tasks there."""
    doubt: float = 0.0
    """Variance of both together there."""
    up: float = 0.0
    """Evidence, in nats: half the square of the excess in standard errors."""

    def take(self, trained: float, variance: float, passed: int, tasks: int) -> None:
        """Compare the pass rate in training, and what is not known of it, with held-out tasks."""
        held_out = (passed + 1) / (tasks + 2)
        doubt = variance + held_out * (1.0 - held_out) / tasks
        rise, excess = trained - self.trained, trained - held_out - self.gap
        self.up = max(0.0, excess) ** 2 / (doubt + self.doubt) / 2.0 if rise >= RISE else 0.0
        if rise <= 0.0 or (rise >= RISE and self.up < 1.0):
            self.trained, self.gap, self.doubt = trained, max(0.0, trained - held_out), doubt

    def save(self) -> dict[str, float | None]:
        """As plain data."""
        return {**asdict(self), "trained": None if math.isinf(self.trained) else self.trained}

    @classmethod
    def load(cls, data: dict[str, Any]) -> Self:
        """From what `save` gave."""
        return cls(**data) if data["trained"] is not None else cls()


def _jumped(fresh: list[float]) -> list[float]:
    """Each rate moved up by each jump; what would leave the scale is no jump."""
    padded = [0.0] * max(JUMPS) + fresh
    moved = (padded[max(JUMPS) - by : max(JUMPS) - by + POINTS] for by in JUMPS)
    return [sum(parts) for parts in zip(*moved, strict=True)]


def _risen(row: list[float], climb: float) -> list[float]:
    """A part of each moved up by one point; the last keeps what would leave the scale."""
    risen = [b * (1.0 - climb) + a * climb for a, b in zip([0.0, *row], row, strict=False)]
    risen[-1] += row[-1] * climb
    return risen


def _spread(row: list[float], part: float) -> list[float]:
    """A part of each moved to its two neighbours; the ends keep theirs."""
    left, right = [row[0], *row[:-1]], [*row[1:], row[-1]]
    near = zip(left, row, right, strict=True)
    return [b * (1.0 - part) + (a + c) * part / 2.0 for a, b, c in near]


def _chance(expected: float) -> float:
    return 1.0 - math.exp(-expected)


@functools.lru_cache(maxsize=8192)
def _likelihoods(likeness: float, value: float, count: int) -> tuple[float, ...]:
    """Beta-binomial likelihood at each rate; the largest is 1."""
    weight = 1.0 / likeness - 1.0
    logs = [log_likelihood(rate * weight, (1.0 - rate) * weight, value, count) for rate in RATES]
    return tuple(math.exp(log - max(logs)) for log in logs)


def log_likelihood(a: float, b: float, value: float, count: float) -> float:
    """Of a beta-binomial, without the factor that is the same for every rate."""
    log = math.lgamma
    return log(a + value) - log(a) + log(b + count - value) - log(b)
