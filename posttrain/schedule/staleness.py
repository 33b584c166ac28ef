"""Which sampled tokens may still be trained on: a bound on their age along the lineage.

A *lineage* is the chain of weight versions that the surviving weights descend from; a resume goes
back on it and cuts the versions beyond off. Age is judged when the step that trains begins, so
time spent waiting counts. The one thing that must stay true: no token older than the bound, and
none of a version that was rolled back, is ever trained on; the oldest token decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from posttrain.core.errors import IllegalTransitionError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageStats:
    """Where a lineage stands."""

    current: int
    highest: int
    """Greatest version ever published, rolled back or not."""
    length: int
    """Versions on the surviving chain, the first weights included."""


class Lineage:
    """The chain of versions from the first weights (version 0) to the current ones.

    >>> lineage = Lineage()
    >>> for version in (1, 2, 3): lineage.publish(version, parent=version - 1)
    >>> lineage.rewind(1); lineage.publish(4, parent=1)
    >>> lineage.age(1), lineage.age(4), lineage.age(3)
    (1, 0, None)
    """

    def __init__(self) -> None:
        self._chain = [0]
        self._depth = {0: 0}
        self._highest = 0

    @property
    def current(self) -> int:
        """The version whose weights the trainer holds."""
        return self._chain[-1]

    @property
    def next_version(self) -> int:
        """The version the next update will make: higher than any there ever was."""
        return self._highest + 1

    def publish(self, version: int, *, parent: int) -> None:
        """`version` now continues the chain.

        Raises:
            IllegalTransitionError: it is not new, or its parent is not the current version.
        """
        if version <= self._highest or parent != self.current:
            raise IllegalTransitionError(
                f"version {version} of parent {parent} cannot follow version {self.current}; "
                f"versions up to {self._highest} are taken.",
                "report this as a bug, with the run's ledger.",
            )
        self._depth[version] = len(self._chain)
        self._chain.append(version)
        self._highest = version

    def rewind(self, version: int) -> None:
        """Go back to `version`; what came after it is rolled back for ever.

        Raises:
            IllegalTransitionError: `version` is not on the surviving chain.
        """
        if version not in self._depth:
            raise IllegalTransitionError(
                f"cannot go back to version {version}: the surviving versions are "
                f"{self._chain[0]} … {self.current} ({len(self._chain)} of them).",
                "resume from a checkpoint of this run.",
            )
        while self.current != version:
            del self._depth[self._chain.pop()]

    def age(self, version: int) -> int | None:
        """Updates between `version` and the current one; None: it was rolled back."""
        depth = self._depth.get(version)
        return None if depth is None else len(self._chain) - 1 - depth

    def check(self) -> None:
        """Invariants: the chain ascends, and each version knows its place."""
        assert self._chain == sorted(set(self._chain)), "a lineage ascends"
        assert self._depth == {version: i for i, version in enumerate(self._chain)}
        assert self._highest >= self.current

    def stats(self) -> LineageStats:
        """Where the lineage stands."""
        return LineageStats(current=self.current, highest=self._highest, length=len(self._chain))


class Freshness(StrEnum):
    """What may be done with sampled tokens."""

    FRESH = "fresh"
    STALE = "stale"
    ROLLED_BACK = "rolled_back"


class Staleness:
    """The bound: tokens at most `bound` updates old may be trained on; 0 means this version's."""

    def __init__(self, lineage: Lineage, *, bound: int) -> None:
        if bound < 0:
            raise UsageError(f"wanted a staleness bound of 0 or more, got {bound}.")
        self._lineage = lineage
        self._bound = bound

    def judge(self, versions: Iterable[int]) -> Freshness:
        """Judge an attempt now by the versions of its trained tokens (-1: sampled by nobody, such
        as an oracle's; they have no age). One rolled-back or too old token decides.
        """
        verdict = Freshness.FRESH
        for version in versions:
            if version < 0:
                continue
            age = self._lineage.age(version)
            if age is None:
                return Freshness.ROLLED_BACK
            if age > self._bound:
                verdict = Freshness.STALE
        return verdict
