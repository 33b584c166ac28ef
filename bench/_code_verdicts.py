"""Verdicts on code: how many a second, and what isolation adds to running the same cases bare.

Two tasks in turn: a hidden suite over a function (three tests, eight calls) and a program with
three cases. A verdict is everything from the reply to the finding: a fresh sandbox of the warm pool
that a run has, harness, a process a test or case. Bare is the same work without any of that: one
interpreter that executes candidate and tests, one interpreter a case.

What isolation adds is the difference of the two, round by round, one at a time, each begun when the
pool has come to rest: what it does on its own (end the sandbox that was used, warm the next one, in
which the harness is started ahead) is no part of either. It is part of `code_per_s` and of the
`busy_ms` of each verdict there, over several tasks that each ask for one after the other.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import subprocess
import time

from posttrain.core.clock import RealClock
from posttrain.core.task import Check, Description, Task
from posttrain.core.trajectory import AttemptKey, Trajectory, Turn
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.moves import PAUSE_S
from posttrain.sandbox.pool import PoolSettings
from posttrain.sandbox.pooled import PooledSandboxes, room
from posttrain.verify.execution import INTERPRETER
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack

WORKERS = 4
FUNCTION = "def total(numbers):\n    return sum(numbers)\n"
TESTS = (
    "from solution import total\n"
    "def test_few(): assert total([]) == 0 and total([7]) == 7 and total([1, 2]) == 3\n"
    "def test_negative(): assert total([-1]) == -1 and total([-4, 4]) == 0\n"
    "def test_many():\n"
    "    for n in (10, 100, 1000): assert total(list(range(n))) == sum(range(n))\n"
)
PROGRAM = "print(sum(map(int, input().split())))\n"
CASES = [["1 2 3", "6"], ["-5 5", "0"], ["100", "100"]]
CHECKS = {
    FUNCTION: Check(kind="suite", params={"suite": TESTS}),
    PROGRAM: Check(kind="stdio", params={"cases": CASES}),
}


def code_verdicts(quick: bool) -> dict[str, float]:
    """`code_per_s`; `isolation_ms_p50` and `isolation_ms_p95`; `code_ms_p50`, of one verdict."""
    return asyncio.run(_measured(rounds=40 if quick else 200, seconds=5.0 if quick else 20.0))


async def _measured(*, rounds: int, seconds: float) -> dict[str, float]:
    settings = PoolSettings(max_alive=room())
    clock = RealClock()
    async with (
        BubblewrapSandboxes() as source,
        PooledSandboxes(source, clock, settings) as sandboxes,
    ):
        stack = Stack(Tools(clock=clock, sandboxes=sandboxes))
        for code in CHECKS:
            await _verdict_s(stack, code)
        pairs = []
        for _, code in zip(range(rounds), itertools.cycle(CHECKS), strict=False):
            await _rest(sandboxes)
            bare_s = await asyncio.to_thread(_bare_s, code)
            await _rest(sandboxes)
            pairs.append((await _verdict_s(stack, code), bare_s))
        added = [verdict_s - bare_s for verdict_s, bare_s in pairs]
        per_s, busy = await _per_s(stack, seconds)
    return {
        "code_per_s": round(per_s, 1),
        "busy_ms_p50": _ms(statistics.median(busy)),
        "busy_ms_p95": _ms(_p95(busy)),
        "code_ms_p50": _ms(statistics.median(verdict_s for verdict_s, _ in pairs)),
        "bare_ms_p50": _ms(statistics.median(bare_s for _, bare_s in pairs)),
        "isolation_ms_p50": _ms(statistics.median(added)),
        "isolation_ms_p95": _ms(_p95(added)),
    }


async def _rest(sandboxes: PooledSandboxes) -> None:
    """Until the pool has done nothing for longer than it ever waits with something to do."""
    since_s = time.perf_counter()
    while time.perf_counter() - since_s < 2 * PAUSE_S:
        stats = sandboxes.stats()
        if stats.warming or stats.draining:
            since_s = time.perf_counter()
        await asyncio.sleep(0.005)


def _p95(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=20)[-1]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


async def _verdict_s(stack: Stack, code: str) -> float:
    task = Task(
        domain="bench.code", level=0, seed=0, description=Description(objective="Write it."),
        checks=(CHECKS[code],),
    )  # fmt: skip
    attempt = Trajectory(
        key=AttemptKey(run="bench", draw=0, member=0),
        task=task,
        turns=(Turn(text=f"```python\n{code}```\n"),),
    )
    started_s = time.perf_counter()
    verdict = await stack.verify(attempt, None)
    taken_s = time.perf_counter() - started_s
    assert verdict.reward == 1.0, verdict
    return taken_s


def _bare_s(code: str) -> float:
    """The same cases in plain processes."""
    started_s = time.perf_counter()
    if code == FUNCTION:
        tests = TESTS.partition("\n")[2]
        calls = "test_few(); test_negative(); test_many()"
        subprocess.run(
            [*INTERPRETER, "-c", f"{code}{tests}{calls}\n"], env={"PATH": os.defpath}, check=True
        )
    else:
        for given, expected in CASES:
            ended = subprocess.run(
                [*INTERPRETER, "-c", code], input=given.encode(), stdout=subprocess.PIPE,
                env={"PATH": os.defpath}, check=True,
            )  # fmt: skip
            assert ended.stdout.split() == [expected.encode()]
    return time.perf_counter() - started_s


async def _per_s(stack: Stack, seconds: float) -> tuple[float, list[float]]:
    """Verdicts a second over several tasks that each ask for one after the other, and how long
    each took.
    """
    started_s = time.perf_counter()
    taken: list[float] = []

    async def ask() -> None:
        for code in itertools.cycle(CHECKS):
            if time.perf_counter() - started_s > seconds:
                return
            taken.append(await _verdict_s(stack, code))

    await asyncio.gather(*(ask() for _ in range(WORKERS)))
    return len(taken) / (time.perf_counter() - started_s), taken
