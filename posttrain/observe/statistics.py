"""Honest small-sample statistics: intervals, paired tests, correction for many tests, quantiles.

Not a statistics library: only what a claim of this project may rest on, in plain Python. The one
thing that must stay true: every p-value here is valid at any sample size (exact, or a permutation
estimate that is never below 1 / (rounds + 1)); none rests on a normal approximation.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from posttrain.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Interval:
    """A closed interval."""

    low: float
    high: float


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion (Wilson 1927); (0, 1) where nothing was observed.

    Raises:
        UsageError: `successes` is not in 0 … n, or `confidence` not in (0, 1).

    >>> interval = wilson(8, 10)
    >>> round(interval.low, 4), round(interval.high, 4)
    (0.4902, 0.9433)
    """
    if not 0 <= successes <= n:
        raise UsageError(f"wanted successes in 0 … {n}, got {successes}.")
    if not 0 < confidence < 1:
        raise UsageError(f"wanted a confidence between 0 and 1, got {confidence}.")
    if n == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate, spread = successes / n, z * z / n
    centre = (rate + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(rate * (1 - rate) / n + spread / (4 * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(low, high)


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided p of McNemar's exact test: `b` pairs changed one way, `c` the other way.

    Twice the smaller tail of Binomial(b + c, 1/2), at most 1; 1.0 where no pair changed.

    >>> mcnemar_exact(1, 9)
    0.021484375
    """
    if b < 0 or c < 0:
        raise UsageError(f"wanted counts of changed pairs, got {b} and {c}.")
    n = b + c
    tail = sum(math.comb(n, k) for k in range(min(b, c) + 1))
    return min(1.0, float(2 * tail / 2**n)) if n else 1.0


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p-values of Holm's step-down procedure (Holm 1979), in the order of the input.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'b': 0.06, 'c': 0.06}
    """
    adjusted: dict[str, float] = {}
    highest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p_values}


def paired_permutation(
    differences_by_stratum: Mapping[str, Sequence[float]], *, seed: int = 0, rounds: int = 20_000
) -> float:
    """Two-sided p of the macro mean of paired differences, by flipping signs within strata.

    The statistic is the mean over strata of the mean difference (empty strata are left out); under
    the null hypothesis each difference could as well have had the other sign. All sign patterns
    are counted where there are at most `rounds` distinct ones, otherwise `rounds` of them are
    sampled and p = (1 + extreme) / (1 + rounds). 1.0 where no pair differs.

    >>> paired_permutation({"a": [1, 1, 1, 1], "b": [1, 1, 1, 1]})
    0.0078125
    """
    terms = _terms(differences_by_stratum)
    observed = abs(
        math.fsum(
            math.fsum(values) / len(values) for values in differences_by_stratum.values() if values
        )
    )
    threshold = observed - 1e-9 * math.fsum(term.size * term.count for term in terms)
    if not terms:
        return 1.0
    if math.prod(term.count + 1 for term in terms) <= rounds:
        extreme = sum(ways for total, ways in _patterns(terms) if abs(total) >= threshold)
        return float(extreme / 2 ** sum(term.count for term in terms))
    chance = random.Random(seed)
    hits = sum(abs(_flipped(terms, chance)) >= threshold for _ in range(rounds))
    return (1 + hits) / (1 + rounds)


def quantile(values: Sequence[float], q: float) -> float:
    """The `q`-quantile by linear interpolation between order statistics (type 7).

    Raises:
        UsageError: no values, or `q` outside [0, 1].

    >>> quantile([4, 1, 3, 2], 0.5)
    2.5
    """
    if not values or not 0 <= q <= 1:
        raise UsageError(f"wanted at least one value and q in [0, 1], got {len(values)} and {q}.")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (place - below) * (ordered[above] - ordered[below]))


@dataclass(frozen=True, slots=True)
class _Term:
    """`count` differences of one stratum that have the same absolute size."""

    size: float
    """Contribution of one of them to the statistic."""
    count: int


def _terms(differences_by_stratum: Mapping[str, Sequence[float]]) -> list[_Term]:
    terms = []
    for values in differences_by_stratum.values():
        sizes = Counter(abs(value) for value in values if value != 0)
        terms += [_Term(size / len(values), count) for size, count in sizes.items()]
    return terms


def _patterns(terms: Sequence[_Term]) -> Iterator[tuple[float, int]]:
    """Every distinct value of the statistic with the number of sign patterns that give it."""
    for positives in itertools.product(*(range(term.count + 1) for term in terms)):
        pairs = list(zip(terms, positives, strict=True))
        total = math.fsum(term.size * (2 * up - term.count) for term, up in pairs)
        yield total, math.prod(math.comb(term.count, up) for term, up in pairs)


def _flipped(terms: Sequence[_Term], chance: random.Random) -> float:
    """The statistic under one random sign pattern; the bits of one number are the signs."""
    return math.fsum(
        term.size * (2 * chance.getrandbits(term.count).bit_count() - term.count) for term in terms
    )
