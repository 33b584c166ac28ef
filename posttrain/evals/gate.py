"""The promotion gate: has a policy become better, and has it become worse anywhere?

A pure comparison of two evaluations of one suite. The one thing that must stay true: a domain
counts as improved only where the gain is significant *and* ends above the best constant answer; one
significant fall, in a watch domain too, closes the gate.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from posttrain.evals import metrics
from posttrain.evals.metrics import Constant, Evaluation, Pair
from posttrain.observe.statistics import holm, mcnemar_exact

IMPROVED_P = 0.01
FALLEN_P = 0.05
MACRO_P = 0.05
MIN_COVERAGE = 0.9
"""Share of a domain's tasks that must have been scored both times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One domain before and after."""

    domain: str
    watch: bool
    """Not trained: evaluated to notice forgetting."""
    n: int
    """Tasks scored both times."""
    coverage: float
    """Their share of the domain's tasks."""
    before: float
    """Pass rates over those tasks; 0 where there are none."""
    after: float
    p: float
    """Exact McNemar, two-sided."""
    p_holm: float = 1.0
    """The same, corrected over all evaluated domains."""
    constant: Constant | None

    @property
    def above_constant(self) -> bool:
        """Whether it ends above the best constant answer."""
        return self.after > (self.constant.rate if self.constant else 0.0)

    @property
    def improved(self) -> bool:
        """Whether it gained significantly, and ends above the best constant answer."""
        return self.after > self.before and self.above_constant and self.p < IMPROVED_P

    @property
    def fallen(self) -> bool:
        """Whether it fell significantly."""
        return self.after < self.before and self.p_holm < FALLEN_P


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the gate decided, with everything it rests on."""

    comparisons: tuple[Comparison, ...]
    macro_before: float
    """Macro pass rates over the trained domains."""
    macro_after: float
    macro_p: float
    reasons: tuple[str, ...]
    """Why the gate stays closed; () where it opens."""

    @property
    def promoted(self) -> bool:
        """Whether the gate opens."""
        return not self.reasons

    @property
    def improved(self) -> tuple[str, ...]:
        """Trained domains that improved."""
        return tuple(one.domain for one in self.comparisons if one.improved and not one.watch)

    @property
    def fallen(self) -> tuple[str, ...]:
        """Domains that fell, watch domains included."""
        return tuple(one.domain for one in self.comparisons if one.fallen)


def decide(before: Evaluation, after: Evaluation, *, watch: Collection[str] = ()) -> Decision:
    """Compare two evaluations; `watch` names the domains that were not trained.

    Raises:
        UsageError: the evaluations cannot be compared.
    """
    constants = {domain: score.constant for domain, score in metrics.scores(after).items()}
    found = [
        _compared(domain, pairs, constants[domain], watch=domain in watch)
        for domain, pairs in metrics.pairs(before, after).items()
    ]
    corrected = holm({one.domain: one.p for one in found})
    comparisons = tuple(replace(one, p_holm=corrected[one.domain]) for one in found)
    trained = [one for one in comparisons if not one.watch]
    macro_before = sum(one.before for one in trained) / len(trained) if trained else 0.0
    macro_after = sum(one.after for one in trained) / len(trained) if trained else 0.0
    macro_p = metrics.macro_gain_p(before, after, [one.domain for one in trained])
    return Decision(
        comparisons=comparisons,
        macro_before=macro_before,
        macro_after=macro_after,
        macro_p=macro_p,
        reasons=_reasons(comparisons, macro_after - macro_before, macro_p),
    )


def _compared(
    domain: str, pairs: Sequence[Pair], constant: Constant | None, *, watch: bool
) -> Comparison:
    scored = metrics.scored_twice(pairs)
    n = len(scored)
    return Comparison(
        domain=domain,
        watch=watch,
        n=n,
        coverage=n / len(pairs) if pairs else 0.0,
        before=sum(old for old, _ in scored) / n if n else 0.0,
        after=sum(new for _, new in scored) / n if n else 0.0,
        p=mcnemar_exact(scored.count((True, False)), scored.count((False, True))),
        constant=constant,
    )


def _reasons(
    comparisons: tuple[Comparison, ...], macro_gain: float, macro_p: float
) -> tuple[str, ...]:
    found = [
        f"{one.domain} fell from {one.before:.3f} to {one.after:.3f} "
        f"(p {one.p_holm:.2g} after correction over {len(comparisons)} domains)"
        for one in comparisons
        if one.fallen
    ]
    found += [
        f"{one.domain}: only {one.coverage:.0%} of its tasks were scored both times"
        for one in comparisons
        if one.coverage < MIN_COVERAGE
    ]
    if macro_gain <= 0 or macro_p >= MACRO_P:
        found.append(f"no significant macro gain ({macro_gain:+.3f}, p {macro_p:.2g})")
    return tuple(found)
