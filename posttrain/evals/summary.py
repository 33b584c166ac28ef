"""What a run amounts to: its steps, its evaluations, and whether each domain got better.

Plain records made from journal notes; no files are read here (`evals.report` does) and nothing is
drawn. The one thing that must stay true: every p-value is paired on the tasks both points share,
and a fall is judged after Holm's correction over *all* evaluated domains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from posttrain.core.events import Note
from posttrain.core.task import Json
from posttrain.observe import statistics
from posttrain.observe.statistics import Interval

IMPROVED_P = 0.01
"""A domain improved where its paired p is below this."""
FELL_P = 0.05
"""A domain fell where its corrected p is below this."""

POINTS = ("base", "sft", "rl")
"""Points of a run at which it is evaluated, in order."""

POINT_NAMES: Mapping[str, str] = {"base": "base", "sft": "after SFT", "rl": "after RL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimiser step as the journal tells it."""

    step: int
    phase: str
    x: int
    """Place on a common axis of all phases."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """May hold values that are not finite."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Mean reward by domain."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Attempts with a reward, by domain."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0
    wall_s: float = 0.0

    @property
    def reward(self) -> float | None:
        """Mean reward over all attempts of the step; None where there was none."""
        total = sum(self.counts.get(name, 0) for name in self.rewards)
        if not total:
            return None
        return math.fsum(self.rewards[n] * self.counts.get(n, 0) for n in self.rewards) / total


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One domain at one point."""

    n: int
    passed: int
    results: Mapping[str, bool] = field(default_factory=dict)
    """Passed or not, by task."""

    @property
    def rate(self) -> float:
        """Share of tasks passed; 0 where there were none."""
        return self.passed / self.n if self.n else 0.0

    @property
    def interval(self) -> Interval:
        """Wilson's 95 % interval."""
        return statistics.wilson(self.passed, self.n)


class Direction(StrEnum):
    """What became of a domain."""

    IMPROVED = "improved"
    FELL = "fell"
    UNCHANGED = "unchanged"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One domain over the whole run."""

    domain: str
    trained: bool
    points: Mapping[str, Measured]
    """By point, in order; points that were not evaluated are left out."""
    constant: float | None = None
    """Rate of the best constant answer on the same tasks; None: not known."""
    p: float | None = None
    """Exact McNemar between the first and the last point; None where no pair exists."""
    p_holm: float | None = None
    """`p` corrected over all evaluated domains."""

    @property
    def first(self) -> Measured:
        """The earliest point."""
        return next(iter(self.points.values()))

    @property
    def last(self) -> Measured:
        """The latest point."""
        return list(self.points.values())[-1]

    @property
    def direction(self) -> Direction:
        """Improved at p < 0.01, or fell at corrected p < 0.05."""
        if self.p is None or self.p_holm is None:
            return Direction.UNKNOWN
        if self.last.rate > self.first.rate and self.p < IMPROVED_P:
            return Direction.IMPROVED
        if self.last.rate < self.first.rate and self.p_holm < FELL_P:
            return Direction.FELL
        return Direction.UNCHANGED

    @property
    def beats_constant(self) -> bool | None:
        """Whether the last point is above the best constant answer; None: not known."""
        return None if self.constant is None else self.last.rate > self.constant


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What the evaluations say, domain by domain and as a whole."""

    changes: tuple[Change, ...] = ()
    rl_gain: float | None = None
    """Mean over trained domains of (after RL − what RL started from); None: not both evaluated."""
    rl_gain_p: float | None = None
    """Paired permutation p of `rl_gain`."""

    def count(self, direction: Direction | str) -> int:
        """Number of domains that went this way."""
        return sum(change.direction == direction for change in self.changes)

    @property
    def points(self) -> tuple[str, ...]:
        """Points that were evaluated, in order."""
        return tuple(p for p in POINTS if any(p in change.points for change in self.changes))

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if not self.changes:
            return "This run has not been evaluated yet."
        if len(self.points) < 2:
            return f"{_domains(len(self.changes))} evaluated once; there is nothing to compare yet."
        improved = self.count(Direction.IMPROVED)
        fell = self.count(Direction.FELL)
        watched = sum(not change.trained for change in self.changes)
        watch = f" ({watched} of them only watched)" if watched else ""
        below = [
            change.domain
            for change in self.changes
            if change.direction is Direction.IMPROVED and change.beats_constant is False
        ]
        text = (
            f"{improved or 'None'} of {_domains(len(self.changes))}{watch} improved "
            f"(paired p < {IMPROVED_P:g}); {fell or 'none'} fell "
            f"(p < {FELL_P:g} after correction)"
        )
        if below:
            text += f"; still below the best constant answer: {', '.join(below)}"
        return text + "."


def _domains(count: int) -> str:
    return f"{count} domain" + ("" if count == 1 else "s")


# --- from notes -------------------------------------------------------------------------------


def steps_of(notes: Iterable[Note]) -> tuple[Step, ...]:
    """Steps in order. A step that was made again after a resume counts as it was made last."""
    latest: dict[tuple[str, int], Note] = {}
    for note in notes:
        latest[str(note.data.get("phase", "")), int(note.data.get("step", 0))] = note
    steps: list[Step] = []
    phases = list(dict.fromkeys(phase for phase, _ in latest))
    for phase in phases:
        numbers = sorted(number for name, number in latest if name == phase)
        before = steps[-1].x if steps else 0
        shift = 0 if numbers[0] > before else before - numbers[0] + 1
        steps += [_step(latest[phase, number], phase, number, shift) for number in numbers]
    return tuple(steps)


def _step(note: Note, phase: str, number: int, shift: int) -> Step:
    data = note.data
    domains: Mapping[str, Json] = data.get("domains") or {}
    scored = {name: entry for name, entry in domains.items() if entry.get("reward") is not None}
    return Step(
        step=number,
        phase=phase,
        x=number + shift,
        metrics={k: float(v) for k, v in (data.get("metrics") or {}).items() if v is not None},
        rewards={name: float(entry["reward"]) for name, entry in scored.items()},
        counts={name: int(entry.get("n", 1)) for name, entry in scored.items()},
        seconds={k: float(v) for k, v in (data.get("seconds") or {}).items()},
        tokens=int(data.get("tokens") or 0),
        wall_s=float(data.get("wall_s") or 0.0),
    )


def outcomes_of(notes: Iterable[Note], *, watched: Iterable[str] = ()) -> Outcomes:
    """The comparison of all evaluated points; the last note of a point counts.

    Args:
        notes: the notes of kind `eval`.
        watched: domains that were evaluated and never trained on.
    """
    points: dict[str, Mapping[str, Json]] = {}
    for note in notes:
        points[str(note.data.get("point", "base"))] = note.data.get("domains") or {}
    ordered = [point for point in POINTS if point in points]
    names = list(dict.fromkeys(name for point in ordered for name in points[point]))
    watch = set(watched)
    changes = []
    for name in names:
        entries = {point: points[point][name] for point in ordered if name in points[point]}
        changes.append(_change(name, entries, trained=name not in watch))
    corrected = statistics.holm({c.domain: c.p for c in changes if c.p is not None})
    final = [replace(change, p_holm=corrected.get(change.domain)) for change in changes]
    final.sort(key=lambda change: not change.trained)
    gain, p = _rl_gain([change for change in final if change.trained])
    return Outcomes(changes=tuple(final), rl_gain=gain, rl_gain_p=p)


def _change(name: str, entries: Mapping[str, Json], *, trained: bool) -> Change:
    measured = {point: _measured(entry) for point, entry in entries.items()}
    constants = [e["constant"] for e in entries.values() if e.get("constant") is not None]
    first, *_, last = [*measured.values()] if len(measured) > 1 else [None, None]
    return Change(
        domain=name,
        trained=trained,
        points=measured,
        constant=float(constants[-1]) if constants else None,
        p=_paired_p(first, last) if first and last else None,
    )


def _measured(entry: Mapping[str, Json]) -> Measured:
    results = {str(r["task"]): bool(r["passed"]) for r in entry.get("results") or ()}
    return Measured(n=int(entry["n"]), passed=int(entry["passed"]), results=results)


def _paired_p(first: Measured, last: Measured) -> float | None:
    shared = first.results.keys() & last.results.keys()
    if not shared:
        return None
    gained = sum(last.results[task] and not first.results[task] for task in shared)
    lost = sum(first.results[task] and not last.results[task] for task in shared)
    return statistics.mcnemar_exact(gained, lost)


def _rl_gain(changes: Sequence[Change]) -> tuple[float | None, float | None]:
    """Macro gain of RL over what it started from, with its paired p."""
    differences: dict[str, list[float]] = {}
    for change in changes:
        start, end = change.points.get("sft", change.points.get("base")), change.points.get("rl")
        if start is None or end is None:
            continue
        shared = sorted(start.results.keys() & end.results.keys())
        differences[change.domain] = [
            float(end.results[task]) - float(start.results[task]) for task in shared
        ]
    means = [math.fsum(values) / len(values) for values in differences.values() if values]
    if not means:
        return None, None
    return math.fsum(means) / len(means), statistics.paired_permutation(differences)
