"""Rewards of one group to advantages, one member at a time; pure Python in double precision.

Not a loss and not a batch statistic: a group never sees another group's rewards (BR-01), and a
member without a reward takes no part in the baseline (BR-25). The one thing that must stay true: a
group whose rewards are all equal has advantages of exactly 0.0 and is marked `flat`, so that no
backward pass is spent on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

DEVIATION_EPSILON = 1e-6
"""Added to the sample deviation before dividing."""


class Baseline(StrEnum):
    """What a reward is compared with."""

    MEAN = "mean"
    """Mean of the group's rewards, the member's own included."""
    LEAVE_ONE_OUT = "leave_one_out"
    """Mean of the other members' rewards (RLOO, arXiv 2402.14740, section 3)."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of one group, in the order of its members."""

    values: tuple[float | None, ...]
    """None where the member has no reward."""
    flat: bool
    """No two rewards differ: every advantage is exactly 0.0 and has no policy gradient."""


def advantages(
    rewards: Sequence[float | None],
    *,
    baseline: Baseline = Baseline.MEAN,
    divide: bool = False,
    epsilon: float = DEVIATION_EPSILON,
) -> Advantages:
    """Advantages of one group.

    `divide` divides by (sample deviation, n - 1 in the denominator) + `epsilon`. A group of one has
    nothing to be compared with: 0.0. The variance is computed in two passes (BR-02).

    >>> advantages([1.0, 0.0, None, 1.0]).values[2] is None
    True
    >>> advantages([0.0, 0.0, 0.0, 1.0]).values
    (-0.25, -0.25, -0.25, 0.75)
    >>> advantages([1.0, 1.0], divide=True)
    Advantages(values=(0.0, 0.0), flat=True)
    """
    known = [reward for reward in rewards if reward is not None]
    for reward in known:
        assert math.isfinite(reward), f"a reward must be finite, got {reward} in {list(rewards)}"
    if len(known) < 2 or max(known) == min(known):
        return Advantages(tuple(None if r is None else 0.0 for r in rewards), flat=True)
    mean = math.fsum(known) / len(known)
    scale = 1.0
    if baseline is Baseline.LEAVE_ONE_OUT:  # r - (n·mean - r)/(n - 1) = (r - mean)·n/(n - 1)
        scale = len(known) / (len(known) - 1)
    if divide:
        squares = math.fsum((reward - mean) ** 2 for reward in known)
        scale /= math.sqrt(squares / (len(known) - 1)) + epsilon
    values = tuple(None if reward is None else (reward - mean) * scale for reward in rewards)
    return Advantages(values, flat=False)
