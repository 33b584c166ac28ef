"""What a ledger says happened: the account, the lineage, and where a run may go on.

A fold over events; it reads no file and repairs nothing. The one thing that must stay true: the
same events give the same past, whatever process asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from posttrain.core import events
from posttrain.core.task import Json
from posttrain.core.trajectory import AttemptKey
from posttrain.core.verdict import Outcome
from posttrain.loop.health import Health
from posttrain.loop.moves import DOMAIN_ERROR, Pending, Phase, Position
from posttrain.schedule.account import Account, Attempt, Status
from posttrain.schedule.staleness import Lineage

QUARANTINE, DISTRUST = "quarantine", "distrust"
"""`Controlled.action` of a domain that is quarantined, of a checkpoint no resume goes on from."""
HOLD, RELEASE = "hold", "release"
"""Of a domain whose attempts are not trained on; `release` undoes it, and a
quarantine."""


@dataclass(slots=True, kw_only=True)
class Past:
    """The state that a run's ledger amounts to."""

    run: str = ""
    config: Mapping[str, Json] = field(default_factory=dict)
    account: Account = field(default_factory=Account)
    lineage: Lineage = field(default_factory=Lineage)
    draws: dict[int, events.Drawn] = field(default_factory=dict)
    places: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)
    """Domain and level → set of tasks → how many draws fell on it: the position in the data."""
    saved: list[events.Saved] = field(default_factory=list)
    """Checkpoints of the surviving lineage that a resume may go on from, oldest first."""
    evaluated: list[events.Evaluated] = field(default_factory=list)
    """Those of the ends of phases: none that its phase was trained on after."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Domain → evidence."""
    reverified: dict[str, events.Reverified] = field(default_factory=dict)
    """Attempt key → its newest judgement, where that is a later one than its first."""
    held: dict[str, str] = field(default_factory=dict)
    """Domain → evidence, until it is released."""
    released: dict[str, int] = field(default_factory=dict)
    """Domain → how often it was released."""
    starts: int = 0
    """How often the run was started or resumed."""

    def apply(self, event: events.LedgerEvent) -> None:
        """Fold one event.

        Raises:
            IllegalTransitionError: it does not follow from what came before.
        """
        self.account.apply(event)
        match event:
            case events.Started():
                self.run, self.config = event.run, event.config
                self.starts += 1
            case events.Drawn():
                self.draws[event.draw] = event
                sets = self.places.setdefault((event.domain, event.level), {})
                sets[event.set_key] = event.place + 1
            case events.Entered():
                self.reverified.pop(event.key, None)  # it is made again
            case events.Reverified():
                self.reverified[event.key] = event
            case events.Trained():
                self._train(event)
            case events.Published():
                self.lineage.publish(event.version, parent=event.parent)
            case events.Saved():
                self.saved = [one for one in self.saved if one.step != event.step] + [event]
            case events.Evaluated():
                self.evaluated.append(event)
            case events.Rewound():
                self.lineage.rewind(event.version)
                self.saved = [one for one in self.saved if one.step <= event.step]
                self.evaluated = [one for one in self.evaluated if one.step <= event.step]
            case events.Controlled(action=action) if action == QUARANTINE:
                domain, evidence = event.arguments["domain"], event.arguments["evidence"]
                self.quarantined[str(domain)] = str(evidence)
            case events.Controlled(action=action) if action == DISTRUST:
                step = event.arguments["step"]
                self.saved = [one for one in self.saved if one.step != step]
            case events.Controlled(action=action) if action == HOLD:
                self.held[str(event.arguments["domain"])] = str(event.arguments["evidence"])
            case events.Controlled(action=action) if action == RELEASE:
                domain = str(event.arguments["domain"])
                self.held.pop(domain, None)
                self.quarantined.pop(domain, None)
                self.released[domain] = self.released.get(domain, 0) + 1
            case _:
                pass

    def position(self) -> Position:
        """Where the run goes on: behind the last step, with every draw that is not settled."""
        return Position(
            step=self.account.step,
            next_draw=max(self.draws, default=-1) + 1,
            pending=tuple(
                Pending(draw=draw.draw, phase=Phase(draw.phase), domain=draw.domain)
                for draw in self.draws.values()
                if not self.is_settled(draw.draw)
            ),
            evaluated=frozenset(one.point for one in self.evaluated),
            quarantined=frozenset(self.quarantined),
            held=frozenset(self.held),
            health=self._health(),
        )

    def statuses(self, draw: int) -> Mapping[AttemptKey, Status | None]:
        """Where each attempt of a draw stands; None: it never entered."""
        attempts = {key: self.account.attempt(key.hex) for key in self._keys(self.draws[draw])}
        return {key: a.status if a is not None else None for key, a in attempts.items()}

    def is_settled(self, draw: int) -> bool:
        """Whether each attempt of a draw was trained or dropped."""
        settled = (Status.TRAINED, Status.DROPPED)
        return all(status in settled for status in self.statuses(draw).values())

    def _train(self, event: events.Trained) -> None:
        """A phase that goes on after its evaluation will end at other weights."""
        attempts = filter(None, map(self.account.attempt, event.keys))
        phases = {self.draws[attempt.draw].phase for attempt in attempts}
        self.evaluated = [one for one in self.evaluated if one.point not in phases]

    def _keys(self, draw: events.Drawn) -> list[AttemptKey]:
        return [AttemptKey(run=self.run, draw=draw.draw, member=m) for m in range(draw.size)]

    def _health(self) -> dict[str, Health]:
        """What is pending ends once more when its draw is opened again, and counts then."""
        found: dict[str, Health] = {}
        for draw in (one for one in self.draws.values() if self.is_settled(one.draw)):
            known = map(self.account.attempt, (key.hex for key in self._keys(draw)))
            ends = [end for one in known if one and (end := _end(one))]
            found.setdefault(draw.domain, Health()).record(ends)
        return found


def _end(attempt: Attempt) -> Outcome | None:
    """How an attempt ended; None where it was dropped for no failing of its own."""
    if attempt.reason.startswith(DOMAIN_ERROR):
        return Outcome.INFRA_FAILED
    return Outcome(attempt.finished.outcome) if attempt.finished else None


def fold(ledger: Iterable[events.LedgerEvent]) -> Past:
    """The past of a whole ledger.

    Raises:
        LedgerError: it cannot be read.
        IllegalTransitionError: its events contradict one another.
    """
    past = Past()
    for event in ledger:
        past.apply(event)
    return past
