"""The account of attempts: what the ledger's events mean, folded one by one.

    (none) ──entered──▶ ENTERED ──finished──▶ FINISHED ──trained──▶ TRAINED
                        ▲  │ ▲                   │ │  ▲                │
             entered ───┘  │ └──entered (again)──┘ │  └────rewound─────┘
            (next try)     └──────dropped──────────┴──▶ DROPPED

It decides nothing and writes nothing; events of other kinds pass it by. The one thing that must
stay true: entered = trained + dropped + pending at any time, and along the lineage of the
surviving weights no attempt is trained twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from posttrain.core.errors import IllegalTransitionError
from posttrain.core.events import Dropped, Entered, Finished, LedgerEvent, Rewound, Trained


class Status(StrEnum):
    """Where an attempt is on its way; the first two are *pending*."""

    ENTERED = "entered"
    FINISHED = "finished"
    TRAINED = "trained"
    DROPPED = "dropped"


TRANSITIONS: Mapping[Status | None, frozenset[Status]] = {
    None: frozenset({Status.ENTERED}),
    Status.ENTERED: frozenset({Status.ENTERED, Status.FINISHED, Status.DROPPED}),
    Status.FINISHED: frozenset({Status.ENTERED, Status.TRAINED, Status.DROPPED}),
    Status.TRAINED: frozenset({Status.FINISHED}),
    Status.DROPPED: frozenset(),
}
"""TRAINED → FINISHED is made by `Rewound` alone; ENTERED again needs a higher try."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """What the account knows of one attempt."""

    key: str
    draw: int
    member: int
    tries: int
    status: Status = Status.ENTERED
    finished: Finished | None = None
    """Its last end, with the place of its trajectory; None while it is being made."""
    step: int | None = None
    """The step that trained it, along the surviving lineage."""
    reason: str = ""
    """Why it was dropped."""

    @property
    def story(self) -> str:
        """One line for people."""
        parts = [f"attempt {self.key} (draw {self.draw}, member {self.member})"]
        parts.append(f"entered {self.tries} time{'s' if self.tries > 1 else ''}")
        if self.finished is not None:
            parts.append(f"finished as {self.finished.outcome}")
        if self.step is not None:
            parts.append(f"was trained at step {self.step}")
        if self.reason:
            parts.append(f"was dropped ({self.reason})")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountStats:
    """The sums: `entered` = `trained` + dropped + `pending`."""

    entered: int
    trained: int
    dropped: Mapping[str, int]
    """Count by reason (the part of it before a colon)."""
    pending: int
    finished: int
    """Those of the pending that are finished and wait for a step."""
    step: int
    """Last step of the surviving lineage."""


class Account:
    """Folds ledger events. An event that breaks the table raises and changes nothing."""

    def __init__(self) -> None:
        self._attempts: dict[str, Attempt] = {}
        self._count = Counter[Status]()
        self._reasons = Counter[str]()
        self._trained: list[Trained] = []

    @property
    def step(self) -> int:
        """Last step of the surviving lineage; 0 before the first."""
        return self._trained[-1].step if self._trained else 0

    def apply(self, event: LedgerEvent) -> None:
        """Fold one event.

        Raises:
            IllegalTransitionError: the event does not follow from what came before.
        """
        match event:
            case Entered():
                self._enter(event)
            case Finished():
                attempt = self._expect(event.key, Status.FINISHED)
                attempt.finished = event
                self._move(attempt, Status.FINISHED)
            case Trained():
                self._train(event)
            case Dropped():
                self._drop(event)
            case Rewound():
                self._rewind(event)
            case _:
                pass

    def attempt(self, key: str) -> Attempt | None:
        """What is known of an attempt, or None if it never entered."""
        return self._attempts.get(key)

    def attempts(self) -> list[Attempt]:
        """All attempts, as they entered."""
        return list(self._attempts.values())

    def pending(self) -> list[Attempt]:
        """Attempts that are neither trained nor dropped, by draw and member."""
        waiting = (Status.ENTERED, Status.FINISHED)
        found = [attempt for attempt in self._attempts.values() if attempt.status in waiting]
        return sorted(found, key=lambda attempt: (attempt.draw, attempt.member))

    def check(self) -> None:
        """Invariants, counted afresh."""
        afresh = Counter(attempt.status for attempt in self._attempts.values())
        assert +self._count == afresh, f"{self._count} ≠ {afresh}"
        keys = [key for event in self._trained for key in event.keys]
        assert len(keys) == len(set(keys)) == afresh[Status.TRAINED]
        assert self._reasons.total() == afresh[Status.DROPPED]
        steps = [event.step for event in self._trained]
        assert steps == sorted(set(steps)), "steps ascend"
        for event in self._trained:
            assert all(self._attempts[key].step == event.step for key in event.keys)

    def stats(self) -> AccountStats:
        """The sums."""
        finished = self._count[Status.FINISHED]
        return AccountStats(
            entered=len(self._attempts),
            trained=self._count[Status.TRAINED],
            dropped=dict(self._reasons),
            pending=self._count[Status.ENTERED] + finished,
            finished=finished,
            step=self.step,
        )

    def _enter(self, event: Entered) -> None:
        attempt = self._attempts.get(event.key)
        if attempt is None:
            self._attempts[event.key] = Attempt(
                key=event.key, draw=event.draw, member=event.member, tries=event.tries
            )
            self._count[Status.ENTERED] += 1
            return
        self._expect(event.key, Status.ENTERED)
        if event.tries <= attempt.tries:
            raise _broken(f"it cannot enter as try {event.tries} again", attempt)
        attempt.tries = event.tries
        attempt.finished = None
        self._move(attempt, Status.ENTERED)

    def _train(self, event: Trained) -> None:
        if event.step <= self.step:
            raise IllegalTransitionError(
                f"step {event.step} cannot follow step {self.step} without going back first.",
                "report this as a bug, with the run's ledger.",
            )
        for attempt in self._expect_all(event.keys, Status.TRAINED):
            attempt.step = event.step
            self._move(attempt, Status.TRAINED)
        self._trained.append(event)

    def _drop(self, event: Dropped) -> None:
        for attempt in self._expect_all(event.keys, Status.DROPPED):
            attempt.reason = event.reason
            self._reasons[event.reason.partition(":")[0]] += 1
            self._move(attempt, Status.DROPPED)

    def _rewind(self, event: Rewound) -> None:
        while self._trained and self._trained[-1].step > event.step:
            for key in self._trained.pop().keys:
                attempt = self._attempts[key]
                attempt.step = None
                self._move(attempt, Status.FINISHED)

    def _expect_all(self, keys: Sequence[str], target: Status) -> list[Attempt]:
        attempts = [self._expect(key, target) for key in keys]
        if len(set(keys)) != len(keys):
            twice = next(key for key, count in Counter(keys).items() if count > 1)
            raise _broken(f"one event names it twice as {target}", self._attempts[twice])
        return attempts

    def _expect(self, key: str, target: Status) -> Attempt:
        attempt = self._attempts.get(key)
        if attempt is None:
            raise IllegalTransitionError(
                f"attempt {key} cannot be {target}: it never entered.",
                "report this as a bug, with the run's ledger.",
            )
        from_rewind_alone = attempt.status is Status.TRAINED
        if from_rewind_alone or target not in TRANSITIONS[attempt.status]:
            raise _broken(f"it cannot be {target} now", attempt)
        return attempt

    def _move(self, attempt: Attempt, status: Status) -> None:
        self._count[attempt.status] -= 1
        self._count[status] += 1
        attempt.status = status


def _broken(what: str, attempt: Attempt) -> IllegalTransitionError:
    return IllegalTransitionError(
        f"{what}: {attempt.story}.", "report this as a bug, with the run's ledger."
    )
