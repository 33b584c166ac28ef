"""What a run amounts to: its steps, its evaluations, and whether each domain got better.

Plain records made from journal notes; no files are read here (`evals.report` does), nothing is
drawn, and nothing is judged anew: `evals.gate` compares the first point with the last. The one
thing that must stay true: what the table, the report and the gate say of a domain is one judgement.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from posttrain.core.events import Note
from posttrain.core.task import Json
from posttrain.core.trajectory import Sampling
from posttrain.core.verdict import Outcome
from posttrain.evals import metrics
from posttrain.evals.gate import FALLEN_P, IMPROVED_P, Comparison, decide
from posttrain.evals.metrics import Constant, Evaluation, Result, Score

POINT_NAMES: Mapping[str, str] = {"base": "base", "sft": "after SFT", "rl": "after RL"}
"""Points of a run at which it is evaluated, in order, as people read them."""


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
    def sampled(self) -> bool:
        """Whether its attempts were the policy's own; those of `sft` are oracles'."""
        return self.phase != "sft"

    @property
    def reward(self) -> float | None:
        """Mean reward over all attempts of the step; None where there was none."""
        total = sum(self.counts.get(name, 0) for name in self.rewards)
        if not total:
            return None
        return math.fsum(self.rewards[n] * self.counts.get(n, 0) for n in self.rewards) / total


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one evaluation of a run says, as a place on its course."""

    step: int
    rates: Mapping[str, float]
    """Pass rate by domain."""
    scored: Mapping[str, int]
    """Tasks with a reward, by domain."""


class Direction(StrEnum):
    """What became of a domain."""

    IMPROVED = "improved"
    BELOW_CONSTANT = "below_constant"
    """A significant gain that does not end above the best constant answer."""
    FELL = "fell"
    UNCHANGED = "unchanged"
    UNKNOWN = "unknown"
    """There is nothing to compare."""


DIRECTION_NAMES: Mapping[Direction, str] = {
    Direction.IMPROVED: "▲ improved",
    Direction.BELOW_CONSTANT: "below constant",
    Direction.FELL: "▼ fell",
    Direction.UNCHANGED: "no clear change",
    Direction.UNKNOWN: "–",
}
"""As people read them, in the terminal and in the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One domain over the whole run."""

    domain: str
    watch: bool
    """Evaluated, never trained on."""
    scores: Mapping[str, Score]
    """By point, in order; points that were not evaluated are left out."""
    comparison: Comparison | None = None
    """First against last point; None where there is only one."""

    @property
    def last(self) -> Score:
        """The score of the latest point."""
        return list(self.scores.values())[-1]

    @property
    def constant(self) -> Constant | None:
        """The best constant answer on the same tasks; None where none pays."""
        return self.last.constant

    @property
    def direction(self) -> Direction:
        """The gate's judgement in one word."""
        found = self.comparison
        if found is None:
            return Direction.UNKNOWN
        if found.improved:
            return Direction.IMPROVED
        if found.fallen:
            return Direction.FELL
        if found.after > found.before and found.p < IMPROVED_P and not found.above_constant:
            return Direction.BELOW_CONSTANT
        return Direction.UNCHANGED


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What the evaluations say, domain by domain and as a whole."""

    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    """By point, in order."""
    other_suites: tuple[str, ...] = ()
    """Points that were evaluated on other tasks, or under other checks, than the newest one: they
    are compared with nothing.
    """
    changes: tuple[Change, ...] = ()
    """Trained domains first."""
    course: tuple[Reading, ...] = ()
    """All comparable evaluations in order of their steps, those within RL included."""
    rl_gain: float | None = None
    """Mean over trained domains of (after RL − what RL started from); None: not both evaluated."""
    rl_gain_p: float | None = None
    """Paired permutation p of `rl_gain`."""

    @property
    def points(self) -> tuple[str, ...]:
        """Points that were evaluated, in order."""
        return tuple(self.evaluations)

    @property
    def trained(self) -> tuple[Change, ...]:
        """The domains that were trained on."""
        return tuple(change for change in self.changes if not change.watch)

    @property
    def improved(self) -> tuple[str, ...]:
        """Trained domains that improved."""
        return tuple(c.domain for c in self.trained if c.direction is Direction.IMPROVED)

    @property
    def fallen(self) -> tuple[str, ...]:
        """Domains that fell, watched ones included."""
        return tuple(c.domain for c in self.changes if c.direction is Direction.FELL)

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if not self.changes:
            return "This run has not been evaluated yet."
        if len(self.points) < 2:
            return "This run was evaluated once; there is nothing to compare yet."
        if not self.trained:
            return (
                "None of the trained domains was evaluated: whether training helped is not known."
            )
        improved, fell = len(self.improved), len(self.fallen)
        return (
            f"{improved or 'None'} of {_domains(len(self.trained), 'trained ')} improved "
            f"(paired p < {IMPROVED_P:g}, ending above the best constant answer); "
            f"{fell or 'none'} of {_domains(len(self.changes), 'evaluated ')} fell "
            f"(p < {FALLEN_P:g} after correction)."
        )


def _domains(count: int, kind: str) -> str:
    return f"{count} {kind}domain" + ("" if count == 1 else "s")


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


def evaluation_of(note: Note) -> Evaluation:
    """The evaluation a note of kind `eval` tells about."""
    domains: Mapping[str, Json] = note.data["domains"]
    results = tuple(
        _result(name, entry) for name, told in domains.items() for entry in told["results"]
    )
    constants = {
        name: Constant(text=str(told.get("constant_text") or ""), rate=float(told["constant"]))
        for name, told in domains.items()
        if told.get("constant") is not None
    }
    return Evaluation(
        suite=str(note.data.get("suite", "")),
        weights=str(note.data.get("weights", note.data["point"])),
        sampling=Sampling(),
        results=results,
        constants=constants,
        duration_s=float(note.data.get("seconds") or 0.0),
    )


def _result(domain: str, entry: Mapping[str, Json]) -> Result:
    passed = entry["passed"]
    return Result(
        task=str(entry["task"]),
        domain=domain,
        outcome=Outcome.INFRA_FAILED if passed is None else Outcome.SCORED,
        reward=None if passed is None else float(passed),
        text=str(entry.get("text") or ""),
    )


def outcomes_of(notes: Iterable[Note], *, watch: Collection[str] = ()) -> Outcomes:
    """The comparison of all points that were evaluated as the newest one was (a domain's checks may
    have changed in between); the last note of a point counts.

    Args:
        notes: the notes of kind `eval`.
        watch: domains that were evaluated and never trained on.
    """
    latest: dict[str, Note] = {}
    for note in notes:
        latest.pop(str(note.data["point"]), None)
        latest[str(note.data["point"])] = note
    every = {point: evaluation_of(note) for point, note in latest.items()}
    newest = every[next(reversed(latest))] if latest else None
    alike = {p: each for p, each in every.items() if newest and each.is_alike(newest)}
    evaluations = {p: alike[p] for p in POINT_NAMES if p in alike}
    other = tuple(p for p in POINT_NAMES if p in every and p not in alike)
    course = _course((latest[point], each) for point, each in alike.items())
    if not evaluations:
        return Outcomes(course=course)
    scores = {point: metrics.scores(each) for point, each in evaluations.items()}
    first, last = next(iter(evaluations.values())), list(evaluations.values())[-1]
    found = decide(first, last, watch=watch).comparisons if len(evaluations) > 1 else ()
    comparisons = {comparison.domain: comparison for comparison in found}
    changes = [
        Change(
            domain=domain,
            watch=domain in watch,
            scores={p: by_domain[domain] for p, by_domain in scores.items() if domain in by_domain},
            comparison=comparisons.get(domain),
        )
        for domain in last.domains
    ]
    changes.sort(key=lambda change: change.watch)
    trained = [change.domain for change in changes if not change.watch]
    before, after = evaluations.get("sft", evaluations.get("base")), evaluations.get("rl")
    if before is None or after is None or not trained:
        return Outcomes(
            evaluations=evaluations, other_suites=other, changes=tuple(changes), course=course
        )
    rates = metrics.macro_rate(before, trained), metrics.macro_rate(after, trained)
    return Outcomes(
        evaluations=evaluations,
        other_suites=other,
        changes=tuple(changes),
        course=course,
        rl_gain=rates[1] - rates[0] if rates[0] is not None and rates[1] is not None else None,
        rl_gain_p=metrics.macro_gain_p(before, after, trained),
    )


def _course(told: Iterable[tuple[Note, Evaluation]]) -> tuple[Reading, ...]:
    readings = []
    for note, evaluation in told:
        scored = {n: s for n, s in metrics.scores(evaluation).items() if s.rate is not None}
        reading = Reading(
            step=int(note.data.get("step") or 0),
            rates={name: score.rate for name, score in scored.items() if score.rate is not None},
            scored={name: score.scored for name, score in scored.items()},
        )
        readings.append(reading)
    return tuple(sorted(readings, key=lambda reading: reading.step))
