"""Results of an evaluation and the numbers computed from them.

No statistics of its own (`observe.statistics` has them) and no judgement (`gate` has it). The one
thing that must stay true: an attempt that infrastructure or a verifier lost is shown beside the
rate, never in it, as if it had been wrong.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.core.errors import UsageError
from posttrain.core.task import Json
from posttrain.core.trajectory import Sampling, Trajectory
from posttrain.core.verdict import Outcome, StopReason
from posttrain.observe.statistics import Interval, paired_permutation, wilson

TASKS, SANDBOX_TASKS = 128, 48
"""Held-out tasks of a domain, by default; of one whose tasks run in a sandbox."""
PASS_REWARD = 1.0 - 1e-6
"""A reward of at least this passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One attempt at one task of a suite."""

    task: str
    """`Task.id`."""
    domain: str
    outcome: Outcome
    reward: float | None
    """In [0, 1]; None: lost, there is no signal."""
    stop: StopReason = StopReason.FINISHED
    num_tokens: int = 0
    """Tokens the policy sampled."""
    text: str = ""
    """Head of the last reply, for people."""
    error: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether it passed; None where it was lost."""
        return None if self.reward is None else self.reward >= PASS_REWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The best constant answer of a domain: the rate of a policy that never reads the task."""

    text: str
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All results of one policy on one suite."""

    suite: str
    """Hash of the suite."""
    weights: str
    """Hash or name of the weights, unique among all weights ever compared."""
    sampling: Sampling
    results: tuple[Result, ...]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    """By domain; a domain without one has no constant answer that pays."""
    duration_s: float = 0.0
    samples: tuple[Trajectory, ...] = ()
    """A few attempts of each domain, without their token rows, for people."""

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains in the order of the suite."""
        return tuple(dict.fromkeys(result.domain for result in self.results))

    def is_alike(self, other: Evaluation) -> bool:
        """Whether it is of the same suite under the same sampling, so that they can be compared."""
        return (self.suite, self.sampling) == (other.suite, other.sampling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What an evaluation says of one domain."""

    domain: str
    passed: int
    scored: int
    """Attempts with a reward: the denominator."""
    lost: int
    """Attempts without one, by no doing of the policy."""
    mean_reward: float | None
    interval: Interval
    """Wilson 95 %."""
    constant: Constant | None = None

    @property
    def rate(self) -> float | None:
        """Share that passed; None where nothing was scored."""
        return self.passed / self.scored if self.scored else None


def scores(evaluation: Evaluation) -> dict[str, Score]:
    """The score of every domain."""
    return {domain: _score(evaluation, domain) for domain in evaluation.domains}


def _score(evaluation: Evaluation, domain: str) -> Score:
    results = [result for result in evaluation.results if result.domain == domain]
    rewards = [result.reward for result in results if result.reward is not None]
    passed = sum(result.passed is True for result in results)
    return Score(
        domain=domain,
        passed=passed,
        scored=len(rewards),
        lost=len(results) - len(rewards),
        mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
        interval=wilson(passed, len(rewards)),
        constant=evaluation.constants.get(domain),
    )


def note_data(
    evaluation: Evaluation, point: str, *, watch: Collection[str] = ()
) -> dict[str, Json]:
    """The journal's `eval` note of an evaluation at a point of a run (`base`, `sft`, `rl`);
    `passed` of a lost attempt is null. `watch`: domains that are not to be trained on.
    """
    domains: dict[str, Json] = {}
    for name, score in scores(evaluation).items():
        domains[name] = {
            "watch": name in watch,
            "n": score.scored,
            "passed": score.passed,
            "lost": score.lost,
            "mean_reward": score.mean_reward,
            "constant": score.constant.rate if score.constant else None,
            "constant_text": score.constant.text if score.constant else None,
            "results": [
                {"task": one.task, "passed": one.passed, "text": one.text}
                for one in evaluation.results
                if one.domain == name
            ],
        }
    return {
        "point": point,
        "suite": evaluation.suite,
        "weights": evaluation.weights,
        "seconds": evaluation.duration_s,
        "domains": domains,
    }


def macro_rate(evaluation: Evaluation, domains: Sequence[str] | None = None) -> float | None:
    """Mean over domains of their pass rates; None where no domain has one."""
    wanted = evaluation.domains if domains is None else domains
    by_domain = scores(evaluation)
    rates = [rate for name in wanted if (rate := by_domain[name].rate) is not None]
    return math.fsum(rates) / len(rates) if rates else None


Pair = tuple[bool | None, bool | None]
"""Whether a task was passed before and after; None where the attempt was lost."""


def pairs(before: Evaluation, after: Evaluation) -> dict[str, list[Pair]]:
    """Both evaluations task by task, for every domain.

    Raises:
        UsageError: they are not of the same suite and sampling, or name different tasks.
    """
    if not before.is_alike(after):
        raise UsageError(
            "wanted two evaluations of one suite under one sampling, got suites "
            f"{before.suite[:12]} and {after.suite[:12]}, {before.sampling} and {after.sampling}."
        )
    old = {result.task: result for result in before.results}
    new = {result.task: result for result in after.results}
    if set(old) != set(new) or len(old) != len(before.results) or len(new) != len(after.results):
        raise UsageError("wanted each task of the suite once in both evaluations.")
    found: dict[str, list[Pair]] = {domain: [] for domain in before.domains}
    for task, result in old.items():
        found[result.domain].append((result.passed, new[task].passed))
    return found


def scored_twice(pairs: Sequence[Pair]) -> list[tuple[bool, bool]]:
    """The pairs that were scored both times."""
    return [(old, new) for old, new in pairs if old is not None and new is not None]


def macro_gain_p(before: Evaluation, after: Evaluation, domains: Sequence[str]) -> float:
    """Two-sided p of the macro gain in pass rate over the named domains.

    Signs of the per-task differences are flipped within domains: tasks are the units, every domain
    weighs the same, and no distribution is assumed (a normal approximation would be one, over a
    handful of domains).
    """
    paired = pairs(before, after)
    differences = {
        domain: [float(new) - float(old) for old, new in scored_twice(paired[domain])]
        for domain in domains
    }
    return paired_permutation(differences)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n attempts, drawn without replacement, hold one of the c right ones
    (Chen et al. 2021, equation 1).

    Raises:
        UsageError: k is not in 1 … n: with fewer attempts than k the number does not exist.

    >>> round(pass_at_k(8, 3, 4), 6)
    0.928571
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise UsageError(f"pass@{k} wants at least {k} attempts and 0 … n right ones, got {c}/{n}.")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
