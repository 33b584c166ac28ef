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
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from posttrain.verify.drift import Drift, Lag, Surge
from posttrain.verify.signals import WIN, Mark, Seen

HOLD = 4.0
"""Score (nats) of an alarm; what fixes the length between false alarms."""
WATCH, CALM = 2.5, 1.0
"""Scores at which a domain is watched, and at which it no longer is."""
CHANCE = 9.0
"""Nats that one of many marks may bring by chance."""
TELLING = 2.0
"""Nats from which an alarm names a mark."""
TRUST = 3.0
"""Most that marks add: wins that look otherwise alone are no gaming, the pass rate must rise."""
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


@dataclass(slots=True)
class Won:
    """A win whose output is remembered."""

    output: int
    task: str
    marked: bool
    """Whether it counts as near-identical to another task's."""


class Stream:
    """One domain under one verifier version."""

    def __init__(self) -> None:
        self.state = State.OK
        self.verdicts = self.won = 0
        self.rate = Drift()
        self.marks = {mark: Surge() for mark in Mark}
        self.lag = Lag()
        self.tokens = self.turns = 0.0
        self.wins: deque[Won] = deque(maxlen=RECENT)
        self.accepts: deque[str] = deque(maxlen=SAMPLE)
        self.rejects: deque[str] = deque(maxlen=SAMPLE)
        self.accesses = 0

    @property
    def score(self) -> float:
        """The evidence for gaming, in nats: that of the pass rate and of the strongest sign."""
        strongest = max(self.lag.up, *(surge.up for surge in self.marks.values()))
        return self.rate.up + min(TRUST, max(0.0, strongest - CHANCE))

    def take(self, group: Sequence[Seen], level: int) -> None:
        """Take in the verdicts of one group."""
        self.verdicts += len(group)
        self.rate.take(math.fsum(one.reward for one in group), len(group), level=level)
        wins = [one for one in group if one.reward >= WIN]
        usual = {task: self._usual_output(task) for task in {one.task for one in wins}}
        found = [self._marks(one, usual[one.task]) for one in wins]
        for mark, surge in self.marks.items():
            for _ in range(self._twins(wins, usual) if mark is Mark.ALIKE else 0):
                surge.take(1, 1)
            if wins:
                surge.take(sum(mark in marks for marks in found), len(wins))
        self.accesses += sum(Mark.ACCESS in marks for marks in found)
        for one, marks in zip(wins, found, strict=True):
            self._remember(one, marks)
        self.rejects.extend(one.key for one in group if one.reward < WIN)

    def compare(self, passed: int, tasks: int) -> None:
        """Hold the pass rate against that of held-out tasks; the next group tells what follows."""
        if self.verdicts:
            self.lag.take(self.rate.rate, self.rate.variance, passed, tasks)

    def settle(self) -> None:
        """Take what is seen now for granted."""
        self.state, self.accesses = State.OK, 0
        self.rate.settle()
        self.marks = {mark: Surge() for mark in Mark}
        self.lag = Lag()

    def _marks(self, one: Seen, usual: int) -> frozenset[Mark]:
        found = set(one.marks)
        if not one.tool_calls:
            found.add(Mark.NO_TOOLS)
        if one.tokens < SHORT * self.tokens:
            found.add(Mark.SHORTER)
        if one.turns < SHORT * self.turns:
            found.add(Mark.FEWER_TURNS)
        if one.output and one.output == usual:
            found.add(Mark.ALIKE)
        return frozenset(found)

    def _usual_output(self, task: str) -> int:
        """The output that won most of the other tasks of late; 0: none."""
        pairs = {(won.task, won.output): None for won in self.wins if won.task != task}
        counts = Counter(output for _, output in pairs if output)
        return max(counts, key=counts.__getitem__, default=0)

    def _twins(self, wins: Sequence[Seen], usual: Mapping[str, int]) -> int:
        """At how many earlier tasks wins turn out to be near-identical to one of these only now."""
        met = {one.output for one in wins if one.output == usual[one.task]} - {0}
        own = {one.task for one in wins}
        twins = [w for w in self.wins if w.output in met and w.task not in own and not w.marked]
        for won in twins:
            won.marked = True
        return len({won.task for won in twins})

    def _remember(self, one: Seen, marks: frozenset[Mark]) -> None:
        self.won += 1
        weight = max(USUAL, 1.0 / self.won)
        self.tokens += (one.tokens - self.tokens) * weight
        self.turns += (one.turns - self.turns) * weight
        self.wins.append(Won(one.output, one.task, Mark.ALIKE in marks))
        self.accepts.append(one.key)

    def save(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "state": str(self.state),
            "verdicts": self.verdicts,
            "rate": self.rate.save(),
            "marks": {mark.name: drift.save() for mark, drift in self.marks.items()},
            "lag": self.lag.save(),
            "usual": [self.won, self.tokens, self.turns],
            "wins": [[won.output, won.task, won.marked] for won in self.wins],
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
        stream.marks |= {Mark[name]: Surge(**one) for name, one in data["marks"].items()}
        stream.lag = Lag.load(data["lag"])
        stream.won, stream.tokens, stream.turns = data["usual"]
        stream.wins.extend(Won(*one) for one in data["wins"])
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

    def compare(self, domain: str, *, passed: int, tasks: int) -> None:
        """So many of a domain's held-out tasks passed, judged by its newest version."""
        streams = self._streams.get(domain)
        if streams and tasks:
            list(streams.values())[-1].compare(passed, tasks)

    def quarantine(self, domain: str) -> None:
        """People took the domain out: it stays out until it is released."""
        for stream in self._streams.get(domain, {}).values():
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
                stream.rate.check()
                assert min(surge.up for surge in stream.marks.values()) >= 0.0

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
    rates = "; ".join(f"{one.rate:.0%}" for one in stream.rate.levels.values())
    told = f"Under {version}, after {stream.verdicts} verdicts, its pass rate is {rates}"
    told += f" (evidence {stream.rate.up:.1f} nats for a jump up, {stream.rate.down:.1f} for one"
    told += f" down; with what its wins show {stream.score:.1f} of the {HOLD:g} of an alarm)."
    strong = {mark: surge.up for mark, surge in stream.marks.items() if surge.up >= TELLING}
    if strong:
        more = ", ".join(f"{mark} ({up:.1f} nats)" for mark, up in strong.items())
        told += f" More of its wins than before show: {more}."
    if stream.lag.up >= TELLING:
        told += f" Held-out tasks did not follow: {stream.lag.up:.1f} nats that it passes more in"
        told += " training than there."
    if stream.accesses:
        told += f" {stream.accesses} of its wins had {Mark.ACCESS}."
    return told
