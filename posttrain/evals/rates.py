"""How often verdicts are wrong, from the labels of the base sample; how far reviewers agree.

False accepts are counted among what was accepted, false rejects among what was rejected, under the
verdict that counts now: a label says what an attempt deserves and so judges later verdicts too. An
attempt weighs 1 / inclusion probability. Odd attempts are labelled first, so where only part of a
stratum's sample is labelled, those that other sources named too and those that none did are each
weighed up to all of their kind; where one of the two kinds has no label, nothing is known yet. The
one thing that must stay true: what was picked for being odd, and is not in the base sample, counts
for nothing here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from posttrain.evals.metrics import PASS_REWARD
from posttrain.evals.review import Item, deserved
from posttrain.evals.selection import Source
from posttrain.observe.statistics import Interval, wilson


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A share of wrong verdicts."""

    rate: float | None
    """None: not enough was labelled."""
    interval: Interval
    """95 %; Wilson's, over the effective number of labels (Kish 1965), rounded down."""
    labelled: int
    """Attempts of which the labels say what they deserve."""
    sampled: int
    """Attempts in the base sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRates:
    """Of one domain under one verifier, or of all."""

    domain: str
    verifier: str
    false_accept: Rate
    false_reject: Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of first and second reviews."""

    pairs: int
    same: int
    kappa: float | None
    """Cohen's kappa (Cohen 1960); None: no pair, or chance alone makes all agree."""


def rates(items: Iterable[Item]) -> list[VerdictRates]:
    """One for each domain and verifier, by name, and the last one over all."""
    sample = [one for one in items if one.chosen.inclusion]
    weights = _weights(sample)
    groups: dict[tuple[str, str], list[Item]] = {}
    for one in sample:
        groups.setdefault((one.facts.domain, one.facts.verifier), []).append(one)
    named = [*sorted(groups.items()), (("all", ""), sample)]
    return [
        VerdictRates(
            domain=domain,
            verifier=verifier,
            false_accept=_rate([one for one in own if one.facts.accepted], weights),
            false_reject=_rate([one for one in own if not one.facts.accepted], weights),
        )
        for (domain, verifier), own in named
    ]


def agreement(items: Iterable[Item]) -> Agreement:
    """Over every attempt that two people labelled, by their first two labels."""
    pairs = [
        (given[0].label, given[1].label)
        for given in (list(one.labels.values()) for one in items)
        if len(given) > 1
    ]
    same, n = sum(a == b for a, b in pairs), len(pairs)
    first, second = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    by_chance = sum(first[label] * second[label] for label in first)  # times n²
    kappa = (n * same - by_chance) / (n * n - by_chance) if by_chance < n * n else None
    return Agreement(pairs=n, same=same, kappa=kappa)


def deserves(item: Item) -> float | None:
    """The reward that its settled label gives an attempt; None: people do not say."""
    return deserved(item.settled) if item.settled is not None else None


def _weights(sample: Sequence[Item]) -> dict[str, float]:
    """Key → for how many attempts it stands; of those whose labels say what they deserve."""
    kinds = {one.facts.key: _kind(one) for one in sample}
    known = {
        one.facts.key: one.chosen.inclusion
        for one in sample
        if one.chosen.inclusion and deserves(one) is not None
    }
    wanted, got = Counter(kinds.values()), Counter(kinds[key] for key in known)
    unknown = {kind[:2] for kind in wanted if not got[kind]}
    return {
        key: wanted[kinds[key]] / got[kinds[key]] / share
        for key, share in known.items()
        if kinds[key][:2] not in unknown
    }


def _kind(one: Item) -> tuple[str, bool, bool]:
    """Stratum, and whether another source named it too."""
    return one.facts.domain, one.facts.accepted, set(one.chosen.sources) != {Source.BASE}


def _rate(sample: Sequence[Item], weights: Mapping[str, float]) -> Rate:
    known = [one for one in sample if one.facts.key in weights]
    total = math.fsum(weights[one.facts.key] for one in known)
    wrong = math.fsum(weights[one.facts.key] for one in known if _is_wrong(one))
    squares = math.fsum(weights[one.facts.key] ** 2 for one in known)
    effective = math.floor(total * total / squares + 1e-9) if known else 0
    rate = wrong / total if known else None
    return Rate(
        rate=rate,
        interval=wilson(round((rate or 0.0) * effective), effective),
        labelled=sum(deserves(one) is not None for one in sample),
        sampled=len(sample),
    )


def _is_wrong(one: Item) -> bool:
    reward = deserves(one)
    return reward is not None and (reward >= PASS_REWARD) is not one.facts.accepted
