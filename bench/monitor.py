"""The run-time monitor in virtual time: false alarms of honest learners, delay to gamed ones.

A step is one group of every domain. Attempts at one task are alike (correlation 0 to 0.2), groups
have 4, 8 or 16 members. Honest curves rise by at most `HONEST` per verdict; what happens to faster
ones is told beside it. A gamed domain jumps by 20 points; delays are counted in its verdicts.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from posttrain.verify.drift import log_likelihood
from posttrain.verify.monitor import HOLD, Stream
from posttrain.verify.signals import Seen

HONEST = 0.0005
"""Steepest honest rise per verdict: 7.5 points in 150."""
ANSWERS = 40
"""Short answers that a third of the honest domains come to give, and other tasks share."""
STEEPER = (2, 4, 8)
ORACLE_HOLD = 10.7
"""Score at which the oracle had one false alarm in 300 honest domains × 1,000 groups."""
SIZES, LIKENESS = (4, 8, 16), (0.0, 0.05, 0.1, 0.2)
HOLDS = (3.0, 3.5, 4.0, 4.5, 5.0, 6.0)
KINDS = ("flat", "slow", "sigmoid", "from zero", "near one", "levels")
Curve = Callable[[int], float]


def main(quick: bool) -> dict[str, Any]:
    """Three seeds; `--quick`: one seed, fewer domains."""
    seeds, domains, steps = (1, 60, 400) if quick else (3, 300, 1000)
    cases = 60 if quick else 80
    pairs = [(like, second) for like in LIKENESS for second in (False, True)]
    with ProcessPoolExecutor(max_workers=2) as pool:
        play = functools.partial(honest, domains=domains, steps=steps)
        peaks = list(pool.map(play, range(seeds)))
        play = functools.partial(honest, 7, domains=domains // 10, steps=steps)
        steeper = [pool.submit(play, steepness=times * HONEST) for times in STEEPER]
        scores = dict(zip(pairs, pool.map(functools.partial(_cases, cases), pairs), strict=True))
        held = {times: one.result() for times, one in zip(STEEPER, steeper, strict=True)}
    found: dict[str, Any] = {"domains": domains, "steps": steps, "threshold_in_use": HOLD}
    found["oracle_within_150"] = {f"{like:g}": oracle(like, cases=cases) for like in LIKENESS}
    for hold in HOLDS:
        alarms = [sum(peak >= hold for peak in one) for one in peaks]
        found[f"threshold_{hold:g}"] = {"false_alarms_by_seed": alarms} | {
            f"{'second' if second else 'alone'}_{like:g}": delay_summary(
                [delay(run, hold) for run in runs], within=40 if second else 150
            )
            for (like, second), runs in scores.items()
        }
    for times, peaked in held.items():
        share = sum(one >= HOLD for one in peaked) / len(peaked)
        found[f"held_of_learners_{times}_times_as_steep"] = f"{share:.0%}"
    return found


def _cases(cases: int, pair: tuple[float, bool]) -> list[list[tuple[int, float]]]:
    return [gamed(seed, likeness=pair[0], second=pair[1]) for seed in range(cases)]


def oracle(likeness: float, *, cases: int) -> str:
    """Share held within 150 by a CUSUM that is told the true rate at every moment, the likeness and
    the size of the jump, which no monitor knows.
    """
    held = 0
    for seed in range(cases):
        rng = random.Random(f"oracle/{seed}")
        size, rate, score = rng.choice(SIZES), rng.uniform(0.05, 0.75), 0.0
        for step in range(150 // size):
            group = _group(rng, step, size, rate + 0.2, likeness)
            value = math.fsum(one.reward for one in group)
            score += log_ratio(rate + 0.2, rate, likeness, value, size)
            score = max(0.0, score)
            if score >= ORACLE_HOLD:
                held += 1
                break
    return f"{held / cases:.0%}"


def log_ratio(rate: float, other: float, likeness: float, value: float, count: int) -> float:
    """Beta-binomial log-likelihood ratio of two rates."""
    weight = 1.0 / max(likeness, 1e-6) - 1.0
    logs = [
        log_likelihood(one * weight, (1.0 - one) * weight, value, count) for one in (rate, other)
    ]
    return logs[0] - logs[1]


def delay_summary(delays: list[int | None], *, within: int) -> str:
    """Share held within so many verdicts, and the median delay."""
    known = sorted(math.inf if one is None else one for one in delays)
    share = sum(one <= within for one in known) / len(known)
    return f"{share:.0%} within {within}, median {known[len(known) // 2]:g}"


def honest(seed: int, *, domains: int, steps: int, steepness: float = HONEST) -> list[float]:
    """The highest score that each of so many honest domains ever has."""
    return [
        _honest(random.Random(f"{seed}/{number}"), number, steps, steepness)
        for number in range(domains)
    ]


def _honest(rng: random.Random, number: int, steps: int, steepness: float) -> float:
    stream, size, likeness = Stream(), rng.choice(SIZES), rng.choice(LIKENESS)
    kind, peak = KINDS[number % len(KINDS)], 0.0
    curve, tokens = honest_curve(rng, kind, size, steepness), rng.uniform(40, 400)
    terse = rng.random() < 1 / 3  # its outputs come to be one of `ANSWERS`
    for step in range(steps):
        level = step * 3 // steps if kind == "levels" else 0
        rate = curve(step) * (1.0 - 0.25 * level)
        shorter = tokens * (1.0 - 0.5 * step / steps)  # honest learners grow terse
        same = min(1.0, 2 * step / steps) if terse else 0.0
        stream.take(_group(rng, step, size, rate, likeness, tokens=shorter, same=same), level)
        peak = max(peak, stream.score)
    return peak


def honest_curve(rng: random.Random, kind: str, size: int, steepness: float) -> Curve:
    """Pass rate over steps; no steeper than `steepness` per verdict."""
    first = 0.0 if kind == "from zero" else rng.uniform(0.0, 0.6)
    last = rng.uniform(first + 0.1, 1.0)
    if kind == "flat":
        return lambda step: first
    if kind == "near one":
        return lambda step: 0.93 + 0.06 * step / 1000
    if kind == "slow":
        return lambda step: first + (last - first) * min(1.0, step / 1000)
    width = (last - first) / (4 * steepness * size) * rng.uniform(1.0, 1.5)
    middle = rng.uniform(100, 600)
    return lambda step: first + (last - first) * _logistic((step - middle) / width)


def gamed(seed: int, *, likeness: float, second: bool = False) -> list[tuple[int, float]]:
    """Scores around a jump by 20 points: (verdicts since the jump, score); the first entry, at
    0, holds the highest of before. `second`: exploits win with near-identical outputs.
    """
    rng = random.Random(f"gamed/{seed}")
    stream, size = Stream(), rng.choice(SIZES)
    rate, before = rng.uniform(0.05, 0.75), rng.randint(100, 300)
    peak = 0.0
    for step in range(before):
        stream.take(_group(rng, step, size, rate, likeness), 0)
        peak = max(peak, stream.score)
    found, jumped = [(0, peak)], rate + 0.2
    share = 0.2 / jumped if second else 0.0
    for more in range(1, 1 + 600 // size):
        stream.take(_group(rng, before + more, size, jumped, likeness, exploit=share), 0)
        found.append((more * size, stream.score))
    return found


def delay(run: list[tuple[int, float]], hold: float) -> int | None:
    """Verdicts from the jump to the hold; None: not found, or held before the jump already."""
    found = next((verdicts for verdicts, score in run if score >= hold), None)
    return found or None


def _group(
    rng: random.Random,
    step: int,
    size: int,
    rate: float,
    likeness: float,
    *,
    tokens: float = 100.0,
    exploit: float = 0.0,
    same: float = 0.0,
) -> list[Seen]:
    rate = min(1.0 - 1e-4, max(1e-4, rate))
    if likeness:
        weight = 1.0 / likeness - 1.0
        rate = rng.betavariate(rate * weight, (1.0 - rate) * weight)
    answer = 2 + rng.randrange(ANSWERS)  # the task's, whoever gives it
    return [
        Seen(
            key=f"{step}.{member}",
            task=str(step),
            reward=float(rng.random() < rate),
            tokens=int(tokens * rng.lognormvariate(0.0, 0.3)),
            output=_output(rng, answer, exploit, same),
        )
        for member in range(size)
    ]


def _output(rng: random.Random, answer: int, exploit: float, same: float) -> int:
    luck = rng.random()
    if luck < exploit:
        return 1
    return answer if luck < exploit + same else 2 + ANSWERS + rng.getrandbits(40)


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-50.0, min(50.0, x))))
