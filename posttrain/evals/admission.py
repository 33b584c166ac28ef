"""Admission of a domain: may it be trained on at all?

An evaluation of the domain, not of a policy: no model takes part. Answer tasks are judged on
scripted texts; tasks with tools are played through the real executor and sandbox. The one thing
that must stay true: a domain is admitted only if its oracle always earns 1, every attack earns
exactly 0, no solution is in the policy's reach, and its tasks are the same in two processes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain import domains, evals, verify
from posttrain.core import codec, seeds
from posttrain.core.errors import DomainError
from posttrain.core.ports import Clock, Verifier
from posttrain.core.task import Oracle, Task
from posttrain.core.verdict import Outcome, Verdict
from posttrain.domains.mixture import Key, Split, shared_content
from posttrain.domains.supply import Supply
from posttrain.evals import leaks, mutants
from posttrain.evals.attackers import (
    COMMANDS,
    IDLE,
    REPLIES,
    Fixture,
    done,
    hedged,
    roomy,
    said,
)
from posttrain.evals.kills import Judged, Kills, counted
from posttrain.evals.metrics import PASS_REWARD, SANDBOX_TASKS, TASKS, Constant
from posttrain.evals.played import Play
from posttrain.evals.suite import spoken
from posttrain.verify import answers

ORACLE = "oracle"
FIRST_LOOK = 64
"""Tasks of a domain among which a small question space shows by a repeated content."""
MAX_LOOK_S = 15.0
"""Time that such a look may take."""
MAX_TOLD = 5
"""Cases that a report names of each kind of failure."""
MAX_MUTANTS = 3
"""Mutants of each task's oracle that are judged."""
REPEATS = 2
"""How often each oracle is played: a verdict that wavers shows."""


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
    earned: tuple[float | None, ...] = ()
    """Each reward, in order."""

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
    problems: tuple[str, ...] = ()
    """What breaks the contract of domains, as sentences; at most five."""
    kills: Kills | None = None
    """Mutants of the oracles that the checks told from them; None where none was made."""
    constant: Constant | None = None
    """The most frequent gold answer and its share of the tasks; answer domains only."""
    flaky: int = 0
    """Tasks whose oracle earned different rewards when it was played again."""
    make_s: float = 0.0
    """Mean time to make a task with its reference solution, seconds."""
    judge_s: float = 0.0
    """Mean time to play and judge an oracle, seconds."""
    peak_bytes: int = 0
    """Memory of the largest process that made its tasks, which may have made others' as well."""
    remarks: tuple[str, ...] = ()
    """What its results will suffer from, though it is sound."""
    error: str = ""
    """Why the domain could not be examined at all."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not admitted; () where it is."""
        found = [self.error] if self.error else []
        found += self.problems
        told: dict[str, list[str]] = {}
        for probe in self.probes:
            for text in (*probe.wrong, *probe.errors):
                told.setdefault(text, []).append(probe.name)
        found += [f"{', '.join(names)}: {text}" for text, names in told.items()]
        if self.flaky:
            found.append(f"{self.flaky} oracles earned another reward when played again")
        if not self.error and ORACLE not in {probe.name for probe in self.probes}:
            found.append("no oracle was played")
        return tuple(found)

    @property
    def failed(self) -> bool:
        """Whether the examination itself failed somewhere, so that another may end otherwise."""
        return bool(self.error) or any(probe.errors for probe in self.probes)

    @property
    def admitted(self) -> bool:
        """Whether it may be trained on."""
        return not self.reasons


class Examiner:
    """Examines domains."""

    def __init__(
        self, supply: Supply, other: Supply, verifier: Verifier, clock: Clock, *, play: Play,
        search: leaks.Search,
    ) -> None:  # fmt: skip
        """`other` makes the same tasks in processes of its own; `play` carries out tool tasks."""
        self._supply = supply
        self._other = other
        self._verifier = verifier
        self._clock = clock
        self._play = play
        self._search = search

    async def fingerprint(self, keys: Sequence[Key]) -> str:
        """Hash of a task of each key and of the code that judges: changes where an examination may
        come out differently.

        Raises:
            DomainError: the domain cannot make a task.
        """
        tasks = [t for key in keys for t in await self._supply.drawn(key, root_seed=0, numbers=[0])]
        return seeds.hex_key("admission", _judging_code(), *map(_as_text, tasks))

    async def examine(
        self, keys: Sequence[Key], *, per_level: int = 4, seed: int = 0,
        fixtures: Sequence[Fixture] = (),
    ) -> Admission:  # fmt: skip
        """The report on one domain, over `per_level` tasks of each of its keys, and the attempts
        that somebody caught there.
        """
        domain = keys[0].domain
        assert {key.domain for key in keys} == {domain}, "one report is about one domain"
        try:
            return await self._examine(domain, keys, range(per_level), seed, fixtures)
        except DomainError as error:
            return Admission(domain=domain, tasks=0, distinct=0, error=str(error))

    async def _examine(
        self, domain: str, keys: Sequence[Key], numbers: range, seed: int,
        fixtures: Sequence[Fixture],
    ) -> Admission:  # fmt: skip
        tasks: list[Task] = []
        oracles: list[Oracle] = []
        started_s = self._clock.now_s()
        for key in keys:
            made = await self._supply.drawn(key, root_seed=seed, numbers=numbers)
            tasks += made
            oracles += await self._supply.oracles(key, made)
        made_s = self._clock.now_s()
        make_s = (made_s - started_s) / max(1, len(tasks))
        rounds = [await self._probe(ORACLE, tasks, oracles, deserved=1.0) for _ in range(REPEATS)]
        judged_s = self._clock.now_s()
        probes = [_worst(rounds), *await self._undeserving(tasks, oracles)]
        probes += await self._caught(keys, fixtures)
        found = [
            text
            for t, o in zip(tasks, oracles, strict=True)
            for text in await leaks.of(t, o, self._search)
        ]
        problems = [*await self._problems(keys, tasks, oracles, seed, numbers), *found]
        return Admission(
            domain=domain,
            tasks=len(tasks),
            distinct=len({task.content_key for task in tasks}),
            probes=tuple(probes),
            problems=tuple(dict.fromkeys(problems))[:MAX_TOLD],
            flaky=sum(
                len(set(earned)) > 1 for earned in zip(*(r.earned for r in rounds), strict=True)
            ),
            kills=await self._kills(tasks, oracles),
            constant=_constant(tasks, oracles),
            remarks=await self._remarks(keys, tasks, seed, make_s=make_s),
            make_s=make_s,
            judge_s=(judged_s - made_s) / max(1, REPEATS * len(tasks)),
            peak_bytes=await self._supply.peak_bytes(keys[0]),
        )

    async def _undeserving(self, tasks: Sequence[Task], oracles: Sequence[Oracle]) -> list[Probe]:
        """One probe for each attack."""
        golds = [oracle.turns[-1].text for oracle in oracles]
        attempts: dict[str, list[tuple[Task, Oracle]]] = {}

        def attack(name: str, task: Task, turns: Oracle | None) -> None:
            if turns is not None:
                attempts.setdefault(name, []).append((task, turns))

        for number, (task, gold) in enumerate(zip(tasks, golds, strict=True)):
            attack("echo", task, said(task.description.objective))
            if task.executor != "answer":
                for name, text in IDLE.items():
                    attack(name, roomy(task), said(text))
                for name, command in COMMANDS.items():
                    attack(name, roomy(task), done(task, command))
                continue
            for name, text in REPLIES.items():
                if not _equal(gold, text):
                    attack(name, task, said(text))
            other = golds[number - 1]
            if not _equal(gold, other):
                attack("hedge", task, said(hedged(gold, other)))
        return [
            await self._probe(name, [t for t, _ in tried], [o for _, o in tried], deserved=0.0)
            for name, tried in attempts.items()
        ]

    async def _kills(self, tasks: Sequence[Task], oracles: Sequence[Oracle]) -> Kills | None:
        """What becomes of some mutants of each oracle."""
        judged = []
        for task, oracle in zip(tasks, oracles, strict=True):
            made = mutants.of_oracle(oracle, executor=task.executor)
            for what, turns in mutants.some(made, MAX_MUTANTS, seed=task.seed):
                verdict, reward, _ = await self._judged(roomy(task), turns)
                parts = verdict.components if verdict else ()
                judged.append(Judged(name=f"{task.id}: {what}", reward=reward, components=parts))
        return counted(judged) if judged else None

    async def _caught(self, keys: Sequence[Key], fixtures: Sequence[Fixture]) -> list[Probe]:
        """One probe over what somebody caught at tasks of these keys."""
        tasks, turns = [], []
        for key in keys:
            for fixture in fixtures:
                if (fixture.domain, fixture.level) == (key.domain, key.level):
                    tasks.append(roomy(await self._supply.seeded(key, fixture.seed)))
                    turns.append(fixture.turns)
        return [await self._probe("caught", tasks, turns, deserved=0.0)] if tasks else []

    async def _probe(
        self, name: str, tasks: Sequence[Task], turns: Sequence[Oracle], *, deserved: float
    ) -> Probe:
        wrong, errors, earned = [], [], []
        for task, oracle in zip(tasks, turns, strict=True):
            _, reward, error = await self._judged(task, oracle)
            earned.append(reward)
            if reward is None:
                errors.append(error)
                continue
            right = reward >= PASS_REWARD if deserved else reward == 0.0
            if not right:
                wrong.append(f"{task.id} earned {reward:g}, deserves {deserved:g}")
        return Probe(
            name=name,
            tried=len(tasks),
            paid=math.fsum(reward for reward in earned if reward),
            earned=tuple(earned),
            wrong=tuple(wrong[:MAX_TOLD]),
            errors=tuple(dict.fromkeys(errors))[:MAX_TOLD],
        )

    async def _judged(self, task: Task, oracle: Oracle) -> tuple[Verdict | None, float | None, str]:
        """Verdict and reward of these turns, or None and why there is none."""
        if task.executor == "answer":
            verdict = await self._verifier.verify(spoken(task, oracle.turns[-1].text), None)
            return verdict, verdict.reward, "; ".join(verdict.errors)
        played = await self._play(task, oracle)
        outcome = played.outcome or Outcome.INFRA_FAILED
        told = f"{outcome.value}: {played.error or 'without a message'}"
        return played.verdict, played.reward, told

    async def _problems(
        self, keys: Sequence[Key], tasks: Sequence[Task], oracles: Sequence[Oracle],
        seed: int, numbers: range,
    ) -> tuple[str, ...]:  # fmt: skip
        """What breaks the contract of domains, in one process and between two."""
        found: list[str] = []
        again: list[Task] = []
        solved: list[Oracle] = []
        for key in keys:
            own = [task.seed for task in tasks if task.level == key.level]
            found += await self._supply.problems(key, own)
            made = await self._other.drawn(key, root_seed=seed, numbers=numbers)
            again += made
            solved += await self._other.oracles(key, made)
        for one, other in zip(
            zip(tasks, oracles, strict=True), zip(again, solved, strict=True), strict=True
        ):
            if codec.to_json(one[0]) != codec.to_json(other[0]) or one[1] != other[1]:
                found.append(f"{one[0].id} differs between two processes")
        return tuple(dict.fromkeys(found))[:MAX_TOLD]

    async def _remarks(
        self, keys: Sequence[Key], tasks: Sequence[Task], seed: int, *, make_s: float
    ) -> tuple[str, ...]:
        """What its results will suffer from; tasks that are slow to make are not counted."""
        if make_s * FIRST_LOOK > MAX_LOOK_S:
            return (f"a task takes {make_s:.1f} s to make; how many there are was not counted",)
        return await self._shortage(keys, seed, sandboxed=tasks[0].environment is not None)

    async def _shortage(
        self, keys: Sequence[Key], seed: int, *, sandboxed: bool
    ) -> tuple[str, ...]:
        """Whether there are fewer held-out tasks than an evaluation takes. They are counted only
        where a first look meets a content twice: counting takes long where there are many.
        """
        numbers = range(-(-FIRST_LOOK // len(keys)))
        looked = [
            shared_content(task)
            for key in keys
            for task in await self._supply.drawn(key, root_seed=seed, numbers=numbers)
        ]
        if len(set(looked)) == len(looked):
            return ()
        wanted = SANDBOX_TASKS if sandboxed else TASKS
        heldout = await self._distinct(keys, Split.HELDOUT, wanted, seed)
        if heldout >= wanted:
            return ()
        training = await self._distinct(keys, Split.TRAIN, wanted, seed)
        least = "at least " if training >= wanted else ""
        return (
            f"{heldout} distinct held-out and {least}{training} training tasks; an evaluation takes"
            f" {wanted} held-out ones unless told otherwise, and few show only large gains",
        )

    async def _distinct(self, keys: Sequence[Key], split: Split, most: int, seed: int) -> int:
        """Distinct tasks of a split over all keys; `most` or more are not told apart."""
        found: set[str] = set()
        for key in keys:
            pool = await self._supply.pool(key, root_seed=seed, count=most, split=split)
            found |= {shared_content(task) for task in pool}
            if len(found) >= most:
                break
        return len(found)


def _worst(rounds: Sequence[Probe]) -> Probe:
    return next((probe for probe in rounds if not probe.passed), rounds[0])


def _as_text(task: Task) -> str:
    return json.dumps(codec.to_json(task), sort_keys=True)


@functools.cache
def _judging_code() -> str:
    """Hash of the code that judges, scorers of domains included, and of this examination."""
    folders = [Path(str(part.__file__)).parent for part in (domains, evals, verify)]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _equal(gold: str, text: str) -> bool:
    """Whether a junk reply happens to be right: then it deserves what it gets."""
    if answers.same_text(gold, text, ignore_case=True):
        return True
    amount, _, unit = gold.strip().partition(" ")  # "0 days" is 0, where days are asked for
    value = answers.number(amount if unit.isalpha() else gold)
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
