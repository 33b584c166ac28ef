"""The layer algebra: which checks run next, and what a finding becomes.

Layers run in the order guard → deterministic → rule → judge → people. A later one runs only where
no earlier gate has closed and no earlier check has failed itself: the reward is then already
decided, and running on would only cost. It runs nothing itself. The one thing that must stay true:
stopping early never makes a reward larger.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.core.task import Check, Json, Place
from posttrain.core.verdict import Component, Verdict

REWARD_MODEL = "reward_model"
MAX_LEARNED_SHARE = 0.3
"""Of the weight of all checks that pay, what a reward model may have at most."""
MAX_EVIDENCE_CHARS = 2_000
"""Evidence is small: longer texts in it keep their head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    value: float | None
    """In [0, 1]; None: the check abstains."""
    evidence: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next move: the indexes of checks to run now, or why to stop."""

    run: tuple[int, ...] = ()
    stop: str = ""
    """`complete`, `gate closed: NAME`, `check failed: NAME`; '' while there is something to run."""


def plan(checks: Sequence[Check], done: Mapping[int, Component]) -> Plan:
    """Which checks to run next: all undone ones of the earliest unfinished layer.

    >>> guard, exact = Check(kind="not_empty", place=Place.GUARD, gate=True), Check(kind="exact")
    >>> plan([exact, guard], {}).run
    (1,)
    """
    for component in done.values():
        if component.error is not None:
            return Plan(stop=f"check failed: {component.name}")
        if component.gate and component.value is not None and component.value < 1.0:
            return Plan(stop=f"gate closed: {component.name}")
    undone = [index for index in range(len(checks)) if index not in done]
    if not undone:
        return Plan(stop="complete")
    rank = min(checks[index].place.rank for index in undone)
    return Plan(run=tuple(index for index in undone if checks[index].place.rank == rank))


def verdict(done: Mapping[int, Component]) -> Verdict:
    """The verdict of the components so far, in the order in which the task names the checks."""
    return Verdict(components=tuple(done[index] for index in sorted(done)))


def faults(checks: Sequence[Check]) -> tuple[str, ...]:
    """What makes a task's checks unfit to pay anything; () where they are fit.

    >>> faults([Check(kind="judge", place=Place.JUDGE)])
    ('a judge is the only check; add one that a program can carry out',)
    """
    found = []
    if not any(check.place is not Place.GUARD for check in checks):
        found.append("no check beyond guards; a task needs one that judges")
    judging = [check for check in checks if check.place is not Place.GUARD]
    if judging and all(check.place in (Place.JUDGE, Place.PEOPLE) for check in judging):
        found.append("a judge is the only check; add one that a program can carry out")
    paying = [check for check in judging if not check.gate]
    learned = sum(check.weight for check in paying if check.kind == REWARD_MODEL)
    if learned > MAX_LEARNED_SHARE * sum(check.weight for check in paying):
        found.append(f"a reward model has more than {MAX_LEARNED_SHARE:.0%} of the weight")
    if any(check.gate for check in judging if check.kind == REWARD_MODEL):
        found.append("a reward model is a gate; it may weigh, not decide")
    found += [
        f"weight {check.weight} of {check.kind!r}; weights are finite and 0 or more"
        for check in checks
        if not 0 <= check.weight < float("inf")
    ]
    return tuple(found)


def name(checks: Sequence[Check], index: int) -> str:
    """Name of a component: `params.name` or the kind, numbered where a kind occurs twice.

    >>> name([Check(kind="state"), Check(kind="exact"), Check(kind="state")], 2)
    'state.2'
    """
    own = [_label(check) for check in checks]
    if own.count(own[index]) == 1:
        return own[index]
    return f"{own[index]}.{own[: index + 1].count(own[index])}"


def _label(check: Check) -> str:
    return str(check.params.get("name", check.kind))


def provenance(check: Check, code: str = "") -> str:
    """Kind, version, fingerprint of the code, hash of parameters and assets:
    `exact@1+51c07ae3#9f2c41d0`.
    """
    content = json.dumps([dict(check.params), check.assets_sha256], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return f"{judged_by(check, code)}#{digest}"


def judged_by(check: Check, code: str = "") -> str:
    """Kind, version and fingerprint of the code: `exact@1+51c07ae3`."""
    return f"{check.kind}@{check.version}" + (f"+{code}" if code else "")


def judged(check: Check, label: str, finding: Finding, duration_s: float) -> Component:
    """The component of a finding; a value that is no number in [0, 1] is the check's own failure.

    >>> judged(Check(kind="x"), "x", Finding(value=float("nan")), 0.0).error
    'wanted a value in [0, 1], got nan'
    """
    value = finding.value
    try:
        evidence = {key: _small(item) for key, item in finding.evidence.items()}
        json.dumps(evidence, allow_nan=False)
    except (TypeError, ValueError) as error:
        return failed(check, label, f"evidence is no JSON: {error}", duration_s)
    if value is not None and not (isinstance(value, int | float) and 0.0 <= value <= 1.0):
        return failed(check, label, f"wanted a value in [0, 1], got {value!r:.80}", duration_s)
    return Component(
        name=label,
        place=check.place,
        value=None if value is None else float(value),
        weight=check.weight,
        gate=check.gate,
        evidence=evidence,
        duration_s=duration_s,
    )


def failed(check: Check, label: str, error: str, duration_s: float) -> Component:
    """The component of a check that failed itself: no value, and no reward for the attempt."""
    return Component(
        name=label,
        place=check.place,
        value=None,
        weight=check.weight,
        gate=check.gate,
        error=error[:MAX_EVIDENCE_CHARS] or "failed without a message",
        duration_s=duration_s,
    )


def _small(item: Json) -> Json:
    if isinstance(item, str):
        return item if len(item) <= MAX_EVIDENCE_CHARS else item[:MAX_EVIDENCE_CHARS] + " …"
    if isinstance(item, (list, tuple)):
        return [_small(part) for part in item[:32]]
    if isinstance(item, Mapping):
        return {str(key): _small(part) for key, part in list(item.items())[:32]}
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)  # read from what the attempt said or left: no fault of the check
    return item
