"""Held-out suites, and what a policy does on one.

A suite is a fixed list of tasks, none of which training can draw (the split is by hash of what the
policy reads). It is run through `rollout.group` like any attempt, each task once. The one thing
that must stay true: the suite's hash covers everything a result depends on besides the policy, so
equal hashes may share results and different ones are never compared.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from posttrain.core import codec
from posttrain.core.ports import AttemptRequest, Clock, Verifier
from posttrain.core.task import Lane, Oracle, Task
from posttrain.core.trajectory import AttemptKey, Sampling, Trajectory, Turn
from posttrain.evals import metrics
from posttrain.evals.metrics import Constant, Evaluation, Result
from posttrain.evals.registry import Registry

GREEDY = Sampling(temperature=0.0, max_tokens=1024)
"""How a suite is sampled unless said otherwise; a task's own limits apply beside it."""
SAMPLES_PER_DOMAIN = 2
MAX_TEXT_CHARS = 400
CANDIDATES = 3
"""Constant answers tried for each domain: its most frequent gold answers."""


class Source(Protocol):
    """Where tasks come from; a domain's code runs in killable workers, never here."""

    async def heldout(self, domain: str, *, level: int, count: int) -> tuple[Task, ...]:
        """Distinct held-out tasks, always the same ones first; fewer where there are fewer.

        Raises:
            DomainError: the domain raised, hung or broke its contract.
        """
        ...

    async def task(self, domain: str, *, seed: int, level: int) -> Task:
        """One task, as the domain makes it."""
        ...

    async def oracle(self, task: Task) -> Oracle:
        """The reference solution."""
        ...


class Attempts(Protocol):
    """What makes attempts to their verdicts (`rollout.group.Groups`)."""

    async def attempt(self, request: AttemptRequest) -> Trajectory:
        """One attempt; raises nothing but cancellation."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What a suite takes from one domain."""

    domain: str
    levels: tuple[int, ...]
    count: int
    """Tasks in all, spread evenly over the levels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A fixed list of held-out tasks."""

    tasks: tuple[Task, ...]
    missing: Mapping[str, int]
    """Tasks a domain could not supply, by domain; a small question space has no more."""

    @property
    def sha256(self) -> str:
        """Hash of the tasks with their checks, limits and environments."""
        content = json.dumps([codec.to_json(task) for task in self.tasks], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


async def build(slices: Sequence[Slice], source: Source) -> Suite:
    """The suite of the slices, without duplicates; a domain's levels share its count.

    Raises:
        DomainError: a domain could not make its tasks.
    """
    tasks: list[Task] = []
    missing: dict[str, int] = {}
    for part in slices:
        taken = await _take(part, source)
        tasks += taken
        if len(taken) < part.count:
            missing[part.domain] = part.count - len(taken)
    return Suite(tasks=tuple(tasks), missing=missing)


async def _take(part: Slice, source: Source) -> list[Task]:
    taken: dict[str, Task] = {}
    for index, level in enumerate(part.levels):
        levels_left = len(part.levels) - index
        wanted = -(-(part.count - len(taken)) // levels_left)
        pool = await source.heldout(part.domain, level=level, count=wanted + len(taken))
        fresh = [task for task in pool if task.content_key not in taken]
        taken |= {task.content_key: task for task in fresh[:wanted]}
    return list(taken.values())


# --- running one ------------------------------------------------------------------------------

OnFinished = Callable[[Trajectory], None]


class Evaluator:
    """Runs suites on whatever weights an engine slot holds, and remembers results."""

    def __init__(
        self,
        attempts: Attempts,
        verifier: Verifier,
        source: Source,
        clock: Clock,
        *,
        registry: Registry | None = None,
        max_concurrent: int = 64,
    ) -> None:
        self._attempts = attempts
        self._verifier = verifier
        self._source = source
        self._clock = clock
        self._registry = registry
        self._max_concurrent = max_concurrent
        self._constants: dict[str, Mapping[str, Constant]] = {}

    async def evaluate(
        self,
        suite: Suite,
        *,
        weights: str,
        slot: str,
        sampling: Sampling = GREEDY,
        on_finished: OnFinished | None = None,
    ) -> Evaluation:
        """The suite's results under the weights in `slot`; from the registry where it has them.

        `weights` names the weights for the registry and must be theirs alone (a content hash).
        `on_finished` is told of each attempt, or of the stored samples where nothing was run.
        """
        sha256 = suite.sha256
        stored = self._registry and self._registry.get(
            suite=sha256, weights=weights, sampling=sampling
        )
        if stored:
            if on_finished:
                for sample in stored.samples:
                    on_finished(sample)
            return stored
        started_s = self._clock.now_s()
        requests = [
            AttemptRequest(
                key=AttemptKey(run=f"eval/{sha256[:16]}/{weights}", draw=index, member=0),
                task=task,
                sampling=sampling,
                lane=Lane.EVAL,
                slot=slot,
            )
            for index, task in enumerate(suite.tasks)
        ]
        trajectories = await self._run(requests, on_finished)
        duration_s = self._clock.now_s() - started_s
        evaluation = Evaluation(
            suite=sha256,
            weights=weights,
            sampling=sampling,
            results=tuple(result_of(trajectory) for trajectory in trajectories),
            constants=await self.constants(suite),
            duration_s=duration_s,
            samples=tuple(_samples(trajectories)),
        )
        if self._registry and all(result.reward is not None for result in evaluation.results):
            self._registry.put(evaluation)  # what lost attempts is measured again, not remembered
        return evaluation

    async def _run(
        self, requests: Iterable[AttemptRequest], on_finished: OnFinished | None
    ) -> list[Trajectory]:
        room = asyncio.Semaphore(self._max_concurrent)

        async def one(request: AttemptRequest) -> Trajectory:
            async with room:
                trajectory = await self._attempts.attempt(request)
            if on_finished:
                on_finished(trajectory)
            return trajectory

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
        return [task.result() for task in tasks]

    async def constants(self, suite: Suite) -> Mapping[str, Constant]:
        """The best constant answer of each answer domain, found by scoring the most frequent gold
        answers on every task of the suite. Worked out once for each suite.
        """
        sha256 = suite.sha256
        if sha256 not in self._constants:
            found: dict[str, Constant] = {}
            for domain in dict.fromkeys(task.domain for task in suite.tasks):
                tasks = [task for task in suite.tasks if task.domain == domain]
                if all(task.executor == "answer" for task in tasks):
                    found[domain] = await self._best_constant(tasks)
            self._constants[sha256] = found
        return self._constants[sha256]

    async def _best_constant(self, tasks: Sequence[Task]) -> Constant:
        golds = [(await self._source.oracle(task)).turns[-1].text for task in tasks]
        best = Constant(text="", rate=0.0)
        for text, _ in Counter(golds).most_common(CANDIDATES):
            rate = await self._rate(text, tasks)
            if rate > best.rate:
                best = Constant(text=text.strip(), rate=rate)
        return best

    async def _rate(self, text: str, tasks: Sequence[Task]) -> float:
        verdicts = [await self._verifier.verify(spoken(task, text), None) for task in tasks]
        rewards = [verdict.reward for verdict in verdicts if verdict.reward is not None]
        return sum(reward >= metrics.PASS_REWARD for reward in rewards) / max(1, len(rewards))


def spoken(task: Task, text: str) -> Trajectory:
    """An attempt that only said this text; for verifying answers that no policy gave."""
    return Trajectory(
        key=AttemptKey(run="spoken", draw=0, member=0), task=task, turns=(Turn(text=text),)
    )


def result_of(trajectory: Trajectory) -> Result:
    """The result an evaluation keeps of an attempt."""
    assert trajectory.outcome is not None, "an evaluated attempt without an outcome"
    return Result(
        task=trajectory.task.id,
        domain=trajectory.task.domain,
        outcome=trajectory.outcome,
        reward=trajectory.reward,
        stop=trajectory.stop,
        num_tokens=trajectory.num_sampled_tokens,
        text=trajectory.final_text[:MAX_TEXT_CHARS],
        error=(trajectory.error or "")[:MAX_TEXT_CHARS],
    )


def _samples(trajectories: Iterable[Trajectory]) -> Iterable[Trajectory]:
    seen: Counter[str] = Counter()
    for trajectory in trajectories:
        seen[trajectory.task.domain] += 1
        if seen[trajectory.task.domain] <= SAMPLES_PER_DOMAIN:
            yield replace(trajectory, rows=())
