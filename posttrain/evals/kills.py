"""How many mutants of right solutions the checks tell from them: the kill rate, per verifier.

Pure; `mutants` makes them, and what judges is whoever counts. A mutant that lives may be equivalent
to what it was made of, so a rate is a lower bound, and no ground to refuse anything. The one thing
that must stay true: what a check could not judge counts neither as killed nor as alive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from posttrain.core.task import Place
from posttrain.core.verdict import Component
from posttrain.evals.metrics import PASS_REWARD

MAX_ALIVE = 5
"""Mutants alive that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A mutant and what the checks said of it."""

    name: str
    """Task and change, for people."""
    reward: float | None
    """None: there is none, for no fault of the mutant."""
    components: tuple[Component, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One verifier's share."""

    verifier: str
    """Check kind, version and fingerprint of its code."""
    judged: int
    killed: int
    """Of these, given less than 1 by one of its checks."""

    @property
    def rate(self) -> float:
        """Share that was killed."""
        return self.killed / self.judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """What became of the mutants of one domain or data set."""

    judged: int
    """Mutants with a reward."""
    killed: int
    """Of these, those whose reward was below 1."""
    unjudged: int = 0
    alive: tuple[str, ...] = ()
    """Some that were paid in full: wrong, or equivalent."""
    by_verifier: tuple[Kill, ...] = ()
    """Of each that gave a value; one that runs only where others passed was given fewer."""

    @property
    def rate(self) -> float | None:
        """Share that was killed, a lower bound; None where none was judged."""
        return self.killed / self.judged if self.judged else None


def counted(all_judged: Iterable[Judged]) -> Kills:
    """The account of mutants that were judged."""
    judged = killed = unjudged = 0
    alive: list[str] = []
    told: dict[str, list[bool]] = {}
    for one in all_judged:
        if one.reward is None:
            unjudged += 1
            continue
        judged += 1
        killed += one.reward < PASS_REWARD
        if one.reward >= PASS_REWARD:
            alive.append(one.name)
        for verifier, is_short in _short(one.components).items():
            told.setdefault(verifier, []).append(is_short)
    by_verifier = [
        Kill(verifier=name, judged=len(found), killed=sum(found))
        for name, found in sorted(told.items())
    ]
    return Kills(
        judged=judged, killed=killed, unjudged=unjudged, alive=tuple(alive[:MAX_ALIVE]),
        by_verifier=tuple(by_verifier),
    )  # fmt: skip


def _short(components: Iterable[Component]) -> dict[str, bool]:
    """Of each verifier that gave values: whether one of them is below 1."""
    found: dict[str, bool] = {}
    for part in components:
        if part.value is not None and part.place is not Place.GUARD:
            short = part.value < PASS_REWARD
            found[part.verifier_version] = found.get(part.verifier_version, False) or short
    return found
