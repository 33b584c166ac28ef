"""The run-time monitor: which domain's rewards look gamed, for each verifier version.

    OK ──score ≥ WATCH──▶ WATCH ──score ≥ HOLD, or access──▶ ALARM ──quarantine──▶ QUARANTINED
     ◀──score < CALM──────┘                                   │                       │
     ◀────────────────────────── release ─────────────────────┴───────────────────────┘

The score is the evidence for a jump of the pass rate, in nats, plus that of marks that became
frequent among wins, where both agree. An alarm is no verdict of guilt: people look, and release.
It knows no clock and no file. The one thing that must stay true: an alarm stays until it is
released, and what is kept does not grow with the number of verdicts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from posttrain.verify.drift import Drift
from posttrain.verify.signals import WIN, Mark, Seen

HOLD = 14.0
"""Score (nats) of an alarm; what fixes the length between false alarms."""
WATCH, CALM = HOLD / 2, HOLD / 5
"""Scores at which a domain is watched, and at which it no longer is."""
ALONE = 1.5
"""What the pass rate itself must bring before marks count."""
RECENT = 64
"""Wins whose outputs are remembered."""
SAMPLE = 4
"""Accepts, and rejects, handed to people."""
VERSIONS = 4
"""Verifier versions of a domain that are remembered."""
SHORT = 0.5
"""Share of the usual length below which a win is far shorter."""
USUAL = 1.0 / 48
"""Weight of one win in what is usual."""


class State(StrEnum):
    """How far a domain is suspected."""

    OK = "ok"
    WATCH = "watch"
    ALARM = "alarm"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A change of state."""

    domain: str
    version: str
    state: State
    evidence: str
    """One paragraph."""
    accepts: tuple[str, ...] = ()
    """Keys of attempts that people should look at: paid in full."""
    rejects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorStats:
    """Where the monitor stands."""

    verdicts: int
    streams: int
    """Pairs of domain and verifier version that are remembered."""
    states: Mapping[str, State]
    """Domain → the state under its newest version; OK is left out."""


class Stream:
    """One domain under one verifier version."""

    def __init__(self) -> None:
        self.state = State.OK
        self.verdicts = 0
        self.rate = Drift()
        self.marks = {mark: Drift() for mark in Mark}
        self.tokens = self.turns = 0.0
        self.wins: deque[tuple[int, str]] = deque(maxlen=RECENT)
        self.accepts: deque[str] = deque(maxlen=SAMPLE)
        self.rejects: deque[str] = deque(maxlen=SAMPLE)
        self.accesses = 0

    @property
    def score(self) -> float:
        """The evidence for gaming, in nats: marks count only beside a rise of the pass rate."""
        strongest = max(drift.up for drift in self.marks.values())
        return self.rate.up + (strongest if self.rate.up >= ALONE else 0.0)

    def take(self, group: Sequence[Seen], level: int) -> None:
        """Take in the verdicts of one group."""
        self.verdicts += len(group)
        self.rate.take(math.fsum(one.reward for one in group), len(group), level=level)
        wins = [one for one in group if one.reward >= WIN]
        found = [self._marks(one) for one in wins]
        for mark, drift in self.marks.items():
            if wins:
                drift.take(float(sum(mark in marks for marks in found)), len(wins))
        self.accesses += sum(Mark.ACCESS in marks for marks in found)
        for one in wins:
            self._remember(one)
        self.rejects.extend(one.key for one in group if one.reward < WIN)

    def settle(self) -> None:
        """Take what is seen now for granted."""
        self.state, self.accesses = State.OK, 0
        for drift in (self.rate, *self.marks.values()):
            drift.settle()

    def _marks(self, one: Seen) -> frozenset[Mark]:
        found = set(one.marks)
        if not one.tool_calls:
            found.add(Mark.NO_TOOLS)
        if one.tokens < SHORT * self.tokens:
            found.add(Mark.SHORTER)
        if one.turns < SHORT * self.turns:
            found.add(Mark.FEWER_TURNS)
        if one.output and any(o == one.output and task != one.task for o, task in self.wins):
            found.add(Mark.ALIKE)
        return frozenset(found)

    def _remember(self, one: Seen) -> None:
        first = not self.tokens and not self.turns
        self.tokens += (one.tokens - self.tokens) * (1.0 if first else USUAL)
        self.turns += (one.turns - self.turns) * (1.0 if first else USUAL)
        self.wins.append((one.output, one.task))
        self.accepts.append(one.key)

    def save(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "state": str(self.state),
            "verdicts": self.verdicts,
            "rate": self.rate.save(),
            "marks": {mark.name: drift.save() for mark, drift in self.marks.items()},
            "usual": [self.tokens, self.turns],
            "wins": [list(win) for win in self.wins],
            "accepts": list(self.accepts),
            "rejects": list(self.rejects),
            "accesses": self.accesses,
        }

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Stream:
        """From what `save` gave."""
        stream = cls()
        stream.state, stream.verdicts = State(data["state"]), data["verdicts"]
        stream.rate = Drift.load(data["rate"])
        stream.marks |= {Mark[name]: Drift.load(one) for name, one in data["marks"].items()}
        stream.tokens, stream.turns = data["usual"]
        stream.wins.extend((output, task) for output, task in data["wins"])
        stream.accepts.extend(data["accepts"])
        stream.rejects.extend(data["rejects"])
        stream.accesses = data["accesses"]
        return stream


class Monitor:
    """All domains. Verdicts in, changes of state out."""

    def __init__(self) -> None:
        self._streams: dict[str, dict[str, Stream]] = {}
        self._verdicts = 0

    def take(
        self, domain: str, version: str, group: Sequence[Seen], *, level: int = 0
    ) -> Decision | None:
        """Take in the verdicts of one group; the change of state that follows, if any."""
        streams = self._streams.setdefault(domain, {})
        stream = streams.pop(version, None) or Stream()
        streams[version] = stream  # the newest is last
        if len(streams) > VERSIONS:
            del streams[next(iter(streams))]
        self._verdicts += len(group)
        if not group or stream.state in (State.ALARM, State.QUARANTINED):
            return None
        stream.take(group, level)
        state = _next(stream)
        if state is stream.state:
            return None
        stream.state = state
        return Decision(
            domain=domain,
            version=version,
            state=state,
            evidence=_evidence(stream, version),
            accepts=tuple(stream.accepts),
            rejects=tuple(stream.rejects),
        )

    def quarantine(self, domain: str) -> None:
        """People confirmed the alarm: the domain stays out until it is released."""
        for stream in self._streams.get(domain, {}).values():
            if stream.state is State.ALARM:
                stream.state = State.QUARANTINED

    def release(self, domain: str) -> None:
        """People found nothing, or mended it: what is seen from now on is the new reference."""
        for stream in self._streams.get(domain, {}).values():
            stream.settle()

    def check(self) -> None:
        """Invariants."""
        for streams in self._streams.values():
            assert len(streams) <= VERSIONS
            for stream in streams.values():
                assert len(stream.wins) <= RECENT
                for drift in (stream.rate, *stream.marks.values()):
                    drift.check()

    def stats(self) -> MonitorStats:
        """Where the monitor stands."""
        newest = {name: list(streams.values())[-1] for name, streams in self._streams.items()}
        return MonitorStats(
            verdicts=self._verdicts,
            streams=sum(map(len, self._streams.values())),
            states={n: s.state for n, s in newest.items() if s.state is not State.OK},
        )

    def save(self) -> dict[str, Any]:
        """As plain data that `json.dumps` can write."""
        streams = {
            domain: [[version, stream.save()] for version, stream in versions.items()]
            for domain, versions in self._streams.items()
        }
        return {"verdicts": self._verdicts, "streams": streams}

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Monitor:
        """From what `save` gave."""
        monitor = cls()
        monitor._verdicts = data["verdicts"]
        monitor._streams = {
            domain: {version: Stream.load(one) for version, one in versions}
            for domain, versions in data["streams"].items()
        }
        return monitor


def _next(stream: Stream) -> State:
    if stream.accesses or stream.score >= HOLD:
        return State.ALARM
    if max(stream.score, stream.rate.down) >= WATCH:
        return State.WATCH
    if max(stream.score, stream.rate.down) < CALM:
        return State.OK
    return stream.state


def _evidence(stream: Stream, version: str) -> str:
    """One paragraph: what was seen, and how strong it is."""
    levels = stream.rate.levels.values()
    rates = "; ".join(f"{one.rate:.0%} → {one.passed / one.total:.0%}" for one in levels)
    told = f"Under {version}, after {stream.verdicts} verdicts, its pass rate went {rates}"
    told += f" (evidence {stream.rate.up:.1f} of {HOLD:g} nats for a jump up"
    told += f", {stream.rate.down:.1f} for one down)."
    strong = {mark: drift.up for mark, drift in stream.marks.items() if drift.up >= ALONE}
    if strong:
        more = ", ".join(f"{mark} ({up:.1f} nats)" for mark, up in strong.items())
        told += f" More of its wins than before show: {more}."
    if stream.accesses:
        told += f" {stream.accesses} of its wins had {Mark.ACCESS}."
    return told
