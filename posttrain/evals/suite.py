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
from posttrain.core.errors import DomainError
from posttrain.core.ports import AttemptRequest, Clock, Verifier
from posttrain.core.task import Lane, Task
from posttrain.core.trajectory import AttemptKey, Sampling, Trajectory, Turn
from posttrain.domains.mixture import Key, shared_content
from posttrain.domains.supply import Supply
from posttrain.evals import metrics
from posttrain.evals.metrics import Constant, Evaluation, Result
from posttrain.evals.registry import Registry

GREEDY = Sampling(temperature=0.0, max_tokens=1024)
"""How a suite is sampled unless said otherwise; a task's own limits apply beside it."""
SAMPLES_PER_DOMAIN = 2
MAX_TEXT_CHARS = 400
CANDIDATES = 3
"""Constant answers tried for each domain: its most frequent gold answers."""


class Attempts(Protocol):
    """What makes attempts to their verdicts (`rollout.group.Groups`)."""

    async def attempt(self, request: AttemptRequest) -> Trajectory:
        """One attempt; raises nothing but cancellation."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A fixed list of held-out tasks."""

    tasks: tuple[Task, ...]
    golds: tuple[str, ...]
    """Closing text of each task's reference solution."""

    @property
    def sha256(self) -> str:
        """Hash of the tasks with their checks, limits and environments."""
        content = json.dumps([codec.to_json(task) for task in self.tasks], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


async def build(
    keys: Sequence[Key], *, per_domain: int, supply: Supply, root_seed: int = 0
) -> Suite:
    """The suite of the keys: `per_domain` held-out tasks of each domain, spread evenly over its
    levels, no content twice in a domain; all there are where a domain has fewer. `root_seed` is no
    run's seed: runs share suites.

    Raises:
        DomainError: a domain raised, hung, or has no held-out task.
    """
    tasks: list[Task] = []
    golds: list[str] = []
    for domain in dict.fromkeys(key.domain for key in keys):
        own = [key for key in keys if key.domain == domain]
        seen: set[str] = set()
        for number, key in enumerate(own):
            wanted = -(-(per_domain - len(seen)) // (len(own) - number))
            taken = await _take(key, wanted, seen, supply, root_seed)
            seen |= {shared_content(task) for task in taken}
            oracles = await supply.oracles(key, taken)
            tasks += taken
            golds += [oracle.turns[-1].text for oracle in oracles]
        if not seen:
            raise DomainError(
                f"{domain} has no held-out task.",
                "choose a level with a larger question space, or a larger domains.heldout_share",
            )
    return Suite(tasks=tuple(tasks), golds=tuple(golds))


async def _take(
    key: Key, wanted: int, seen: set[str], supply: Supply, root_seed: int
) -> list[Task]:
    """The first `wanted` held-out tasks of a key whose content was not seen at other levels."""
    count = wanted
    while True:
        pool = await supply.pool(key, root_seed=root_seed, count=count)
        fresh = [task for task in pool if shared_content(task) not in seen]
        if len(fresh) >= wanted or len(pool) < count:
            return fresh[:wanted]
        count += wanted - len(fresh)


# --- running one ------------------------------------------------------------------------------

OnFinished = Callable[[Trajectory], None]


class Evaluator:
    """Runs suites on whatever weights an engine slot holds, and remembers results."""

    def __init__(
        self,
        attempts: Attempts,
        verifier: Verifier,
        clock: Clock,
        *,
        registry: Registry | None = None,
        max_concurrent: int = 64,
    ) -> None:
        self._attempts = attempts
        self._verifier = verifier
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
                own = [n for n, task in enumerate(suite.tasks) if task.domain == domain]
                tasks = [suite.tasks[n] for n in own]
                if all(task.executor == "answer" for task in tasks):
                    found[domain] = await self._best_constant(tasks, [suite.golds[n] for n in own])
            self._constants[sha256] = found
        return self._constants[sha256]

    async def _best_constant(self, tasks: Sequence[Task], golds: Sequence[str]) -> Constant:
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
