"""Judgement: components with provenance, the verdict derived from them, and the outcome.

Reward = product of gates × weighted mean of the other components, or *none*. The total is always
derived, never stored in place of its parts. The one thing that must stay true: a reward exists
only under the outcomes `scored` and `policy_failed`; an error is never a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from posttrain.core.task import Json, Place


class Outcome(StrEnum):
    """How an attempt ended, exactly one of."""

    SCORED = "scored"
    POLICY_FAILED = "policy_failed"
    """Nothing can be verified, through the policy's own doing: reward 0."""
    INFRA_FAILED = "infra_failed"
    VERIFIER_FAILED = "verifier_failed"
    CANCELLED = "cancelled"

    @property
    def has_reward(self) -> bool:
        """True for `scored` and `policy_failed` only."""
        return self in (Outcome.SCORED, Outcome.POLICY_FAILED)


class StopReason(StrEnum):
    """Why the attempt ended; independent of the outcome."""

    FINISHED = "finished"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    CONTEXT_LIMIT = "context_limit"
    TIME_LIMIT = "time_limit"
    LOOP = "loop"
    MALFORMED = "malformed"
    REFUSED = "refused"
    ABORTED = "aborted"
    """The attempt was cut from outside (infrastructure or cancellation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """What one check said."""

    name: str
    place: Place
    value: float | None
    """In [0, 1]; None: the check gave no value (it abstained, or `error` says what went wrong)."""
    weight: float = 1.0
    gate: bool = False
    evidence: Mapping[str, Json] = field(default_factory=dict)
    error: str | None = None
    """Set when the check itself failed; the whole verdict is then without reward."""
    duration_s: float = 0.0
    verifier: str = ""
    """Check kind, version, fingerprint of the kind's code, `#`, hash of the check's parameters and
    assets: `exact@1+51c07ae3#9f2c41d0`."""

    @property
    def verifier_version(self) -> str:
        """What judged, whatever the task's parameters: kind, version and code.

        >>> made = Component(name="a", place=Place.RULE, value=1.0, verifier="exact@1+5c#9f")
        >>> made.verifier_version
        'exact@1+5c'
        """
        return self.verifier.partition("#")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Layered judgement of one trajectory."""

    components: tuple[Component, ...] = ()

    @property
    def errors(self) -> tuple[str, ...]:
        """Messages of checks that failed themselves."""
        return tuple(f"{c.name}: {c.error}" for c in self.components if c.error is not None)

    @property
    def gates(self) -> float:
        """Product of the gates: 1.0 where all passed, 0.0 where one did not."""
        values = [c.value for c in self.components if c.gate and c.value is not None]
        return 1.0 if all(value >= 1.0 for value in values) else 0.0

    @property
    def reward(self) -> float | None:
        """In [0, 1], or None where a check failed itself or nothing was judged.

        >>> from posttrain.core.task import Place
        >>> part = dict(place=Place.DETERMINISTIC, weight=1.0)
        >>> Verdict(components=(Component(name="a", value=1.0, **part),
        ...                     Component(name="b", value=0.0, **part))).reward
        0.5
        >>> Verdict(components=(Component(name="a", value=None, error="hung", **part),)).reward
        """
        if self.errors or not self.components:
            return None
        if self.gates == 0.0:
            return 0.0
        scored = [c for c in self.components if not c.gate and c.value is not None]
        total = math.fsum(c.weight for c in scored)
        if total <= 0:
            return 1.0 if any(c.gate and c.value is not None for c in self.components) else None
        return math.fsum(c.weight * (c.value or 0.0) for c in scored) / total
