"""Seeds that verdicts were drawn with, for judging the same attempt by the same hidden inputs.

So that what another verifier says comes from the verifier, and not from another draw. The one thing
that must stay true: a seed comes from the record of that very attempt, or it is a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from posttrain.core.trajectory import Trajectory
from posttrain.core.verdict import Verdict


def seed_of(verdict: Verdict | None) -> int | None:
    """The seed in a verdict's evidence; None where nothing was drawn, or it is not told.

    >>> seed_of(Verdict()) is None
    True
    """
    for component in verdict.components if verdict else ():
        inner = component.evidence.get("evidence")
        seed = inner.get("seed") if isinstance(inner, Mapping) else None
        if type(seed) is int:
            return seed
    return None


def recorded_seeds(otherwise: Callable[[Trajectory], int]) -> Callable[[Trajectory], int]:
    """`kinds.Tools.seeds` for attempts that have a verdict: its seed, or, without one, another."""

    def seed(attempt: Trajectory) -> int:
        found = seed_of(attempt.verdict)
        return otherwise(attempt) if found is None else found

    return seed
