"""Which attempts of a run people should look at, and with what probability.

It reads no file and knows no reviewer (`evals.review` does). A *stratum* is a domain's accepted or
rejected attempts. The one thing that must stay true: whether an attempt is in the base sample
depends on its key, on the size of its stratum and on nothing that it said; rates may rest on the
base sample alone, everything else was picked for being odd.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from posttrain.core.errors import UsageError
from posttrain.evals.metrics import PASS_REWARD


class Source(StrEnum):
    """Why an attempt is in the queue; what comes first is reviewed first."""

    ALARM = "alarm"
    DISAGREEMENT = "disagreement"
    FLIP = "flip"
    OUTLIER = "outlier"
    BASE = "base"


class Facts(NamedTuple):
    """What the choice is made from: one attempt of the policy that has a reward."""

    key: str
    domain: str
    level: int
    seed: int
    ended: int
    """Place in the order in which attempts ended."""
    reward: float
    chance: float
    """Its key as a number in [0, 1)."""
    chars: int | None = None
    """Characters of everything it said; None: that is lost."""
    sketch: str = ""
    """Equal for almost equal texts; '': it said little."""
    first_reward: float | None = None
    """By its first verdict, where it was judged again; None: it was not, or had none then."""
    judged: int = 1
    """How often it was judged."""
    place: str = ""
    """Where the record of it lies."""
    verifier: str = ""
    """What judged it last."""

    @property
    def accepted(self) -> bool:
        """Whether the verdict that counts pays in full."""
        return self.reward >= PASS_REWARD


class Voices(NamedTuple):
    """How far the components of one verdict lie apart, gates and abstentions left out."""

    key: str
    least: float
    most: float
    judge: float | None = None
    """Mean of judges' components; None: there is none."""
    program: float | None = None
    """Mean of all other components."""


class Alarm(NamedTuple):
    """A control by which attempts of a domain were held back."""

    domain: str
    at: int
    """Place in the order of `Facts.ended`."""
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewPlan:
    """How much is looked at."""

    share: float = 0.01
    """Share of each stratum in the base sample."""
    least: int = 2
    """Attempts of each stratum in the base sample, where it has so many."""
    second: float = 0.1
    """Share of the attempts that two people review."""
    lease_s: float = 1800.0
    """How long a claim lasts."""
    around: int = 20
    """Accepted, and as many rejected, attempts around each alarm."""
    most: int = 20
    """Attempts of one domain that each of the other sources names."""

    def __post_init__(self) -> None:
        for name in ("share", "second"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"wanted a share in 0 … 1 as {name}, got {getattr(self, name)}.")
        for name in ("least", "around", "most"):
            if getattr(self, name) < 0:
                raise UsageError(f"wanted 0 or more as {name}, got {getattr(self, name)}.")
        if not 0 < self.lease_s < math.inf:
            raise UsageError(f"wanted a lease of more than 0 s, got {self.lease_s}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """One attempt that is to be reviewed."""

    facts: Facts
    sources: dict[Source, str] = field(default_factory=dict)
    """Everything it came from, with what was seen there."""
    inclusion: float | None = None
    """Probability with which it came into the base sample; None: it is not in it."""


WINDOW = 100
"""Attempts on each side of an alarm among which those to review are chosen."""
JUDGE_GAP = 0.5
"""Distance of judge and program that is a disagreement."""
LENGTH_FACTOR, LEAST_LENGTHS = 4.0, 20
"""A text is an outlier at so many times its domain's median, or such a part of it; least texts."""
LEAST_TASKS = 3
"""Different tasks that were won by almost the same text."""


def select(
    attempts: Sequence[Facts],
    *,
    voices: Iterable[Voices] = (),
    alarms: Iterable[Alarm] = (),
    plan: ReviewPlan,
) -> dict[str, Selected]:
    """The attempts to review, each once, in the order in which they should be."""
    known = {one.key: one for one in attempts}
    chosen: dict[str, Selected] = {}

    def take(source: Source, found: Iterable[tuple[str, str]]) -> None:
        for key, why in found:
            item = chosen.setdefault(key, Selected(facts=known[key]))
            item.sources.setdefault(source, why)

    domains: dict[str, list[Facts]] = {}
    for one in attempts:
        domains.setdefault(one.domain, []).append(one)
    apart = {voice.key: why for voice in voices if voice.key in known and (why := _apart(voice))}
    alike = _alike(attempts)
    for alarm in alarms:
        take(Source.ALARM, _around(alarm, domains.get(alarm.domain, ()), plan.around))
    for own in domains.values():
        odd = _lengths(own) | {one.key: alike[one.key] for one in own if one.key in alike}
        flips = {one.key: why for one in own if (why := _flip(one))}
        own_apart = {one.key: apart[one.key] for one in own if one.key in apart}
        for source, found in (
            (Source.DISAGREEMENT, own_apart), (Source.FLIP, flips), (Source.OUTLIER, odd),
        ):  # fmt: skip
            lowest = sorted(found, key=lambda key: known[key].chance)[: plan.most]
            take(source, ((key, found[key]) for key in lowest))
    base = base_sample(attempts, plan)
    take(Source.BASE, ((key, f"{100 * share:.3g} % sample") for key, share in base.items()))
    rank = list(Source)
    ordered = sorted(
        chosen.values(), key=lambda one: (min(map(rank.index, one.sources)), one.facts.chance)
    )
    return {one.facts.key: replace(one, inclusion=base.get(one.facts.key)) for one in ordered}


def base_sample(attempts: Iterable[Facts], plan: ReviewPlan) -> dict[str, float]:
    """Key → inclusion probability: of each stratum of N attempts the n with the smallest hashes,
    each there with probability n / N; n = max(share × N, least), rounded up, at most N.
    """
    strata: dict[tuple[str, bool], list[tuple[float, str]]] = {}
    for one in attempts:
        strata.setdefault((one.domain, one.accepted), []).append((one.chance, one.key))
    found: dict[str, float] = {}
    for stratum in strata.values():
        size = min(len(stratum), max(math.ceil(plan.share * len(stratum)), plan.least))
        found |= dict.fromkeys((key for _, key in sorted(stratum)[:size]), size / len(stratum))
    return found


def _around(alarm: Alarm, own: Sequence[Facts], wanted: int) -> Iterator[tuple[str, str]]:
    ordered = sorted(own, key=lambda one: one.ended)
    place = bisect_left([one.ended for one in ordered], alarm.at)
    window = ordered[max(0, place - WINDOW) : place + WINDOW]
    for accepted in (True, False):
        side = sorted((one.chance, one.key) for one in window if one.accepted is accepted)
        word = "accepted" if accepted else "rejected"
        yield from ((key, f"{word} around a {alarm.action}") for _, key in side[:wanted])


def _apart(voice: Voices) -> str:
    judge, program = voice.judge, voice.program
    if judge is not None and program is not None and abs(judge - program) >= JUDGE_GAP:
        return f"judge {judge:g} against program {program:g}"
    if voice.most >= PASS_REWARD and voice.least <= 0:
        return "one component pays in full, another nothing"
    return ""


def _flip(one: Facts) -> str:
    if one.judged < 2:
        return ""
    before = one.first_reward is not None and one.first_reward >= PASS_REWARD
    return f"{one.first_reward} became {one.reward:g}" if before is not one.accepted else ""


def _lengths(own: Sequence[Facts]) -> dict[str, str]:
    """Accepted attempts that said much less, or much more, than the domain's accepted ones do."""
    lengths = {one.key: one.chars for one in own if one.accepted and one.chars is not None}
    if len(lengths) < LEAST_LENGTHS:
        return {}
    usual = median(lengths.values())
    return {
        key: f"{length} characters, usual are {usual:g}"
        for key, length in lengths.items()
        if not usual / LENGTH_FACTOR <= length <= usual * LENGTH_FACTOR
    }


def _alike(attempts: Iterable[Facts]) -> dict[str, str]:
    """Accepted attempts that said almost the same at different tasks."""
    groups: dict[str, list[Facts]] = {}
    for one in attempts:
        if one.accepted and one.sketch:
            groups.setdefault(one.sketch, []).append(one)
    found: dict[str, str] = {}
    for group in groups.values():
        tasks = len({(one.domain, one.level, one.seed) for one in group})
        if tasks >= LEAST_TASKS:
            found |= {one.key: f"almost the same text won {tasks} tasks" for one in group}
    return found
