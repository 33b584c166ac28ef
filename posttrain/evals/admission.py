"""Admission of a domain: may it be trained on at all?

An evaluation of the domain, not of a policy: no model takes part. Answer tasks are judged on
scripted texts; tasks with tools are played through the real executor and sandbox. The one thing
that must stay true: a domain is admitted only if its oracle always earns 1, every probe that
deserves nothing earns exactly 0, and its tasks are the same in two processes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from posttrain.core import codec, seeds
from posttrain.core.errors import DomainError
from posttrain.core.ports import AttemptRequest, Clock, Verifier
from posttrain.core.task import Oracle, OracleTurn, Task
from posttrain.core.trajectory import AttemptKey, Sampling, Trajectory
from posttrain.core.verdict import Outcome
from posttrain.evals.metrics import PASS_REWARD, Constant
from posttrain.evals.suite import Source, spoken
from posttrain.observe.statistics import quantile
from posttrain.rollout.group import Groups
from posttrain.rollout.oracle import Executors, OracleExecutor
from posttrain.rollout.render import Renderer
from posttrain.verify import answers

ORACLE = "oracle"
JUNK: Mapping[str, str] = {
    "empty": "",
    "blank": " \n\t",
    "junk": "xyz",
    "zero": "0",
    "punctuation": ":",
    "refusal": "I cannot help with that.",
}
"""Replies that deserve nothing, by the name of their probe (unless one is the gold answer)."""
IDLE: Mapping[str, str] = {"nothing done": "Done.", "junk": "xyz"}
"""Closing texts of attempts that called no tool."""

Play = Callable[[Task, Oracle], Awaitable[Trajectory]]
"""Carries out an oracle's turns as an attempt, to its verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one kind of reply earned over the tasks it was tried on."""

    name: str
    tried: int
    paid: float
    """Sum of rewards."""
    wrong: tuple[str, ...]
    """Tasks whose reward was not what the probe deserves, with what it was; at most five."""
    errors: tuple[str, ...] = ()
    """Distinct messages of attempts without a reward; at most five."""

    @property
    def passed(self) -> bool:
        """Every try earned what it deserves."""
        return self.tried > 0 and not self.wrong and not self.errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The report on one domain."""

    domain: str
    tasks: int
    distinct: int
    """Tasks that differ in what the policy reads."""
    probes: tuple[Probe, ...] = ()
    differing: tuple[str, ...] = ()
    """Tasks that came out different in a second process; at most five."""
    constant: Constant | None = None
    """The most frequent gold answer and its share of the tasks; answer domains only."""
    make_s: float = 0.0
    """95 % quantile of the time to make a task, seconds."""
    judge_s: float = 0.0
    """Mean time to play and judge an oracle, seconds."""
    error: str = ""
    """Why the domain could not be examined at all."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not admitted; () where it is."""
        found = [self.error] if self.error else []
        found += [f"{task} differs between two processes" for task in self.differing]
        for probe in self.probes:
            found += [f"{probe.name}: {text}" for text in (*probe.wrong, *probe.errors)]
        if not self.error and ORACLE not in {probe.name for probe in self.probes}:
            found.append("no oracle was played")
        return tuple(found)

    @property
    def admitted(self) -> bool:
        """Whether it may be trained on."""
        return not self.reasons


class Examiner:
    """Examines domains."""

    def __init__(
        self, source: Source, other: Source, verifier: Verifier, clock: Clock, *, play: Play
    ) -> None:
        """`other` makes the same tasks in processes of its own; `play` carries out tool tasks."""
        self._source = source
        self._other = other
        self._verifier = verifier
        self._clock = clock
        self._play = play

    async def examine(
        self, domain: str, *, levels: Sequence[int], per_level: int = 4, seed: int = 0
    ) -> Admission:
        """The report on a domain, over `per_level` tasks of each level."""
        named = [
            (seeds.hashed("admission", seed, domain, level, number), level)
            for level in levels
            for number in range(per_level)
        ]
        try:
            return await self._examine(domain, named)
        except DomainError as error:
            return Admission(domain=domain, tasks=len(named), distinct=0, error=str(error))

    async def _examine(self, domain: str, named: Sequence[tuple[int, int]]) -> Admission:
        tasks, make_s = [], []
        for own_seed, level in named:
            started_s = self._clock.now_s()
            tasks.append(await self._source.task(domain, seed=own_seed, level=level))
            make_s.append(self._clock.now_s() - started_s)
        oracles = [await self._source.oracle(task) for task in tasks]
        started_s = self._clock.now_s()
        probes = [await self._probe(ORACLE, tasks, oracles, deserved=1.0)]
        judge_s = (self._clock.now_s() - started_s) / max(1, len(tasks))
        probes += await self._undeserving(tasks, oracles)
        return Admission(
            domain=domain,
            tasks=len(tasks),
            distinct=len({task.content_key for task in tasks}),
            probes=tuple(probes),
            differing=await self._differing(tasks, oracles),
            constant=_constant(tasks, oracles),
            make_s=quantile(make_s, 0.95) if make_s else 0.0,
            judge_s=judge_s,
        )

    async def _undeserving(self, tasks: Sequence[Task], oracles: Sequence[Oracle]) -> list[Probe]:
        """One probe for each kind of reply that deserves nothing."""
        texts: dict[str, list[tuple[Task, str]]] = {"echo": []}
        for task, oracle in zip(tasks, oracles, strict=True):
            gold = oracle.turns[-1].text
            texts["echo"].append((task, task.description.objective))
            for name, text in (JUNK if task.executor == "answer" else IDLE).items():
                if not (task.executor == "answer" and _equal(gold, text)):
                    texts.setdefault(name, []).append((task, text))
        probes = []
        for name, tried in texts.items():
            said = [Oracle(turns=(OracleTurn(text=text),)) for _, text in tried]
            probes.append(await self._probe(name, [task for task, _ in tried], said, deserved=0.0))
        return probes

    async def _probe(
        self, name: str, tasks: Sequence[Task], turns: Sequence[Oracle], *, deserved: float
    ) -> Probe:
        wrong, errors, paid = [], [], []
        for task, oracle in zip(tasks, turns, strict=True):
            reward, error = await self._earned(task, oracle)
            if reward is None:
                errors.append(error)
                continue
            paid.append(reward)
            right = reward >= PASS_REWARD if deserved else reward == 0.0
            if not right:
                wrong.append(f"{task.id} earned {reward:g}, deserves {deserved:g}")
        return Probe(
            name=name,
            tried=len(tasks),
            paid=math.fsum(paid),
            wrong=tuple(wrong[:5]),
            errors=tuple(dict.fromkeys(errors))[:5],
        )

    async def _earned(self, task: Task, oracle: Oracle) -> tuple[float | None, str]:
        """The reward of these turns, or None and why there is none."""
        if task.executor == "answer":
            verdict = await self._verifier.verify(spoken(task, oracle.turns[-1].text), None)
            return verdict.reward, "; ".join(verdict.errors)
        trajectory = await self._play(task, oracle)
        outcome = trajectory.outcome or Outcome.INFRA_FAILED
        return trajectory.reward, f"{outcome.value}: {trajectory.error or 'without a message'}"

    async def _differing(self, tasks: Sequence[Task], oracles: Sequence[Oracle]) -> tuple[str, ...]:
        found = []
        for task, oracle in zip(tasks, oracles, strict=True):
            again = await self._other.task(task.domain, seed=task.seed, level=task.level)
            same = codec.to_json(again) == codec.to_json(task)
            if not same or await self._other.oracle(again) != oracle:
                found.append(task.id)
        return tuple(found[:5])


def _equal(gold: str, text: str) -> bool:
    """Whether a junk reply happens to be right: then it deserves what it gets."""
    if answers.same_text(gold, text, ignore_case=True):
        return True
    value = answers.number(gold)
    return value is not None and value == answers.number(text)


def _constant(tasks: Sequence[Task], oracles: Sequence[Oracle]) -> Constant | None:
    golds = Counter(
        oracle.turns[-1].text.strip()
        for task, oracle in zip(tasks, oracles, strict=True)
        if task.executor == "answer"
    )
    if not golds:
        return None
    text, count = golds.most_common(1)[0]
    return Constant(text=text, rate=count / golds.total())


def player(executors: Executors, renderer: Renderer, verifier: Verifier, clock: Clock) -> Play:
    """Plays turns through the executor that the task names, sealed and judged like any attempt."""

    async def play(task: Task, oracle: Oracle) -> Trajectory:
        async def solve(_: Task) -> Oracle:
            return oracle

        executor = OracleExecutor(solve, executors, renderer)
        groups = Groups({task.executor: executor}, verifier, clock)
        request = AttemptRequest(
            key=AttemptKey(run="admission", draw=task.seed, member=0),
            task=task,
            sampling=Sampling(max_tokens=task.limits.max_turn_tokens),
        )
        return await groups.attempt(request)

    return play
