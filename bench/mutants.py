"""Kill rates of the verifiers: how many mutants of right solutions each kind tells from them.

Programs of public data sets (`_programs`; those whose own solution is not paid in full are left
out), answers of GSM8K and AQuA, generated expressions and amounts, and, but for `--quick`, domains
of the catalogue as their admission judges them. `rate` is the share of mutants that was not paid in
full: a lower bound, for some are equivalent (a set in another order). Of a program's mutants that
live, `wrong` are those that a differential check of 500 inputs tells from the solution, and `alike`
those that it does not. What is not there is not measured.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from bench._math_verdicts import PLAIN, SYMBOLIC
from bench._programs import DATA, Program, data_sets
from posttrain.core.clock import RealClock
from posttrain.core.task import Check, Description, Task
from posttrain.core.trajectory import Trajectory
from posttrain.core.verdict import Verdict
from posttrain.domains import catalogue
from posttrain.evals.kills import Judged, Kills, counted
from posttrain.evals.mutants import of_answer, of_program, some
from posttrain.evals.suite import spoken
from posttrain.loop.examining import open_examiner
from posttrain.loop.settings import RunConfig
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.pool import PoolSettings
from posttrain.sandbox.pooled import PooledSandboxes, room
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack

WORKERS = 4
MANY = 500
"""Inputs that tell wrong mutants from equivalent ones."""
HANG_S = 12.0
"""A verdict that takes longer is none: for slightly larger inputs some references need ages."""
DOMAINS = (
    "reasoning_gym.basic_arithmetic", "reasoning_gym.gcd", "reasoning_gym.letter_counting",
    "reasoning_gym.knights_knaves", "reasoning_gym.sudoku", "terminal.*",
)  # fmt: skip
Verify = Callable[[Trajectory], Awaitable[Verdict]]


def main(quick: bool) -> dict[str, Any]:
    return asyncio.run(_measured(quick))


async def _measured(quick: bool) -> dict[str, Any]:
    clock, found = RealClock(), dict[str, dict[str, Any]]()
    async with (
        BubblewrapSandboxes() as source,
        PooledSandboxes(source, clock, PoolSettings(max_alive=room())) as sandboxes,
        ProcessWorkers() as workers,
    ):
        tools = Tools(clock=clock, sandboxes=sandboxes, workers=workers)
        stack = Stack(tools, hang_s=HANG_S)
        turn = asyncio.Semaphore(WORKERS)

        async def verify(attempt: Trajectory) -> Verdict:
            async with turn:
                return await stack.verify(attempt, None)

        for name, programs in data_sets().items():
            chosen = some(programs, 8 if quick else 80, seed=name)
            for kind in ("suite", "stdio", "differential"):
                if any(kind in program.checks for program in chosen):
                    told = await _programs(chosen, kind, verify, most=2 if quick else 3)
                    found[f"{kind} {name}"] = told
        spoken_of = _answers(20 if quick else 400) | _expressions(2 if quick else 40)
        for name, tasks in spoken_of.items():
            found[name] = _record(await _spoken(tasks, verify))
    if not quick:
        found |= await _domains()
    return {"kills": found or None}


def _record(kills: Kills) -> dict[str, Any]:
    rate = None if kills.rate is None else round(kills.rate, 4)
    return {
        "rate": rate, "killed": kills.killed, "judged": kills.judged, "unjudged": kills.unjudged,
    }  # fmt: skip


# --- programs -------------------------------------------------------------------------------------


def _task(name: str, check: Check) -> Task:
    described = Description(objective="Write it.")
    return Task(domain=f"bench.{name}", level=0, seed=0, description=described, checks=(check,))


async def _programs(
    programs: Sequence[Program], kind: str, verify: Verify, *, most: int
) -> dict[str, Any]:
    """What becomes of mutants of these under one kind of check."""
    fit = [program for program in programs if kind in program.checks]
    own = await asyncio.gather(*(_program(one, one.source, kind, verify) for one in fit))
    fit = [one for one, judged in zip(fit, own, strict=True) if judged.reward == 1.0]
    made = [
        (program, mutant)
        for program in fit
        for mutant in some(of_program(program.source), most, seed=program.name)
    ]
    judged = await asyncio.gather(*(_program(p, m.text, kind, verify) for p, m in made))
    alive = [pair for pair, one in zip(made, judged, strict=True) if one.reward == 1.0]
    wrong = await asyncio.gather(*(_differs(p, m.text, verify) for p, m in alive))
    return {
        "programs": len(fit), **_record(counted(judged)),
        "wrong": wrong.count(True), "alike": wrong.count(False),
    }  # fmt: skip


async def _program(program: Program, source: str, kind: str, verify: Verify) -> Judged:
    task = _task(program.name, program.checks[kind])
    verdict = await verify(spoken(task, program.written(source, kind)))
    return Judged(name=program.name, reward=verdict.reward, components=verdict.components)


async def _differs(program: Program, source: str, verify: Verify) -> bool | None:
    """Whether many inputs tell it from the solution; None where that cannot be judged."""
    if not program.inputs:
        return None
    check = Check(kind="differential", params=program.differential(MANY))
    attempt = spoken(_task(program.name, check), program.written(source, "differential"))
    reward = (await verify(attempt)).reward
    return None if reward is None else reward < 1.0


# --- answers --------------------------------------------------------------------------------------


def _answers(most: int) -> dict[str, list[tuple[Task, str]]]:
    """Tasks with their right answers, by kind of check and data set."""
    found: dict[str, list[tuple[Task, str]]] = {}
    for path, name in (("gsm8k/test.jsonl", "numeric gsm8k"), ("aqua/test.jsonl", "choice aqua")):
        file = DATA / path
        for line in file.read_text("utf-8").splitlines()[:most] if file.exists() else ():
            row = json.loads(line)
            if "options" in row:
                gold = row["correct"]
                check = Check(kind="choice", params={"answer": gold, "labels": list("ABCDE")})
            else:
                gold = row["answer"].rpartition("####")[2].strip().replace(",", "")
                check = Check(kind="numeric", params={"answer": gold})
            task = replace(_task(name, check), description=Description(objective=row["question"]))
            found.setdefault(name, []).append((task, gold))
    return found


def _expressions(most: int) -> dict[str, list[tuple[Task, str]]]:
    """Generated tasks by kind of check and form of the gold answer, and amounts with units."""
    found: dict[str, list[tuple[Task, str]]] = {}
    rng = random.Random("mutants")
    for _ in range(most):
        made = [(make.__name__, make(rng)) for make in (*PLAIN, *SYMBOLIC)]
        golds = [(f"{one.kind} {name}", one.kind, one.gold) for name, one in made]
        unit = rng.choice(("km", "m/s", "kg", "%", "USD", "°C", "million"))
        golds.append(("numeric amount", "numeric", f"{rng.randrange(2, 999) / 4} {unit}"))
        for name, kind, gold in golds:
            check = Check(kind=kind, params={"answer": gold})
            found.setdefault(name, []).append((_task(name.replace(" ", "."), check), gold))
    return found


async def _spoken(tasks: Sequence[tuple[Task, str]], verify: Verify) -> Kills:
    judged = []
    for task, gold in tasks:
        for mutant in of_answer(gold):
            verdict = await verify(spoken(task, mutant.text))
            judged.append(Judged(name=task.id, reward=verdict.reward))
    return counted(judged)


# --- domains --------------------------------------------------------------------------------------


async def _domains() -> dict[str, dict[str, Any]]:
    """What the admission of each domain counts, by the kinds of its checks."""
    found = {}
    async with open_examiner(RunConfig(), processes=1) as (supply, examiner, _):
        for pattern in DOMAINS:
            for entry in catalogue.matching(pattern):
                keys = await supply.keys([catalogue.DomainSpec(name=entry.name)])
                kills = (await examiner.examine(keys)).kills
                if kills is not None:
                    kinds = sorted({one.verifier.partition("@")[0] for one in kills.by_verifier})
                    found[f"{'+'.join(kinds)} {entry.name}"] = _record(kills)
    return found
