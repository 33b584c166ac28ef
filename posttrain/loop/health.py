"""When a domain is taken out of the mixture: a window over how its last attempts ended.

Not a judge of the policy: wrong answers are healthy. It counts only what gave no signal through a
failure of the domain, its verifier or the infrastructure beneath it. The one thing that must stay
true: a domain that only fails leaves after `MIN_FAILURES` failed attempts, and one that fails
seldom never does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from posttrain.core.verdict import Outcome

WINDOW = 16
"""Attempts that are looked back on."""

MIN_FAILURES = 8
"""Failures in the window, at least half of it, that quarantine a domain."""

FAILURES = frozenset({Outcome.INFRA_FAILED, Outcome.VERIFIER_FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthStats:
    """How a domain's last attempts ended."""

    attempts: int
    failures: int


class Health:
    """The window of one domain."""

    def __init__(self) -> None:
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._evidence: deque[str] = deque(maxlen=3)

    def record(self, outcomes: Iterable[Outcome], *, errors: Sequence[str] = ()) -> bool:
        """Take in ended attempts; True where the domain should be in quarantine."""
        self._failed.extend(outcome in FAILURES for outcome in outcomes)
        self._evidence.extend(error for error in dict.fromkeys(errors) if error)
        return sum(self._failed) >= max(MIN_FAILURES, len(self._failed) / 2)

    @property
    def evidence(self) -> str:
        """What people are told: how many failed, and the last messages."""
        counts = f"{sum(self._failed)} of its last {len(self._failed)} attempts failed"
        return f"{counts}: {' | '.join(self._evidence)}" if self._evidence else counts

    def check(self) -> None:
        """Invariant: the window is bounded."""
        assert len(self._failed) <= WINDOW

    def stats(self) -> HealthStats:
        """How the domain's last attempts ended."""
        return HealthStats(attempts=len(self._failed), failures=sum(self._failed))
