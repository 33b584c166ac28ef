r"""Verdicts on mathematics: how many a second, through the whole stack and its worker processes.

The mix: tasks of eight attempts each, as in reinforcement learning; a quarter numbers, a quarter
fractions and percentages (decided without a worker), and half radicals, expressions, sets,
intervals, equations and inequalities (decided with SymPy). Half of the replies are right, mostly
written otherwise than the gold answer; no two replies of a task are written alike, and the gold
answers differ. What reaches a worker is counted, not assumed. Every verdict is compared with what
it should be. Starting the processes and their first verdicts are not timed.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.core.clock import RealClock
from posttrain.core.task import Check, Description, Json, Task
from posttrain.core.trajectory import AttemptKey, Trajectory, Turn
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack

PROCESSES = 2
AT_ONCE = 16
REPLIES = 4
"""Right ones of a task, and as many wrong ones."""
FREE = (2, 3, 5, 6, 7, 10, 11, 13, 14, 15)
"""Numbers that no square divides."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A task, and what replies are worth."""

    kind: str
    gold: str
    right: Sequence[str]
    wrong: Sequence[str]


def number(rng: random.Random) -> Asked:
    n = rng.randrange(1_000, 10**7)
    right = (f"{n}", f"{n:,}", f"${n}$", f"{n}.0")
    return Asked("numeric", str(n), right, (f"{n + 1}", f"-{n}", f"{n}.5", f"{n} or {n + 2}"))


def fraction(rng: random.Random) -> Asked:
    p, q, k = rng.randrange(101, 997, 2), 2 ** rng.randrange(3, 8), rng.randrange(3, 9)
    right = (f"{p}/{q}", rf"\dfrac{{{p * k}}}{{{q * k}}}", f"{p / q}", f"{p * k}/{q * k}")
    wrong = (f"{q}/{p}", rf"\frac{{{p + 2}}}{{{q}}}", f"-{p}/{q}", rf"{p / q}\%")
    return Asked("math", rf"\frac{{{p}}}{{{q}}}", right, wrong)


def radical(rng: random.Random) -> Asked:
    a, b, k = rng.randrange(3, 400), rng.choice(FREE), rng.randrange(2, 9)
    right = (
        rf"\sqrt{{{a * a * b}}}", rf"\frac{{{a * b}}}{{\sqrt{{{b}}}}}",
        rf"\frac{{{a * k}\sqrt{{{b}}}}}{{{k}}}", rf"{a}\sqrt{{{b}}}",
    )  # fmt: skip
    wrong = (rf"{a + 1}\sqrt{{{b}}}", rf"-{a}\sqrt{{{b}}}", rf"\sqrt{{{a * b}}}", f"{a * b**0.5}")
    return Asked("math", rf"{a}\sqrt{{{b}}}", right, wrong)


def polynomial(rng: random.Random) -> Asked:
    a, b = rng.randrange(2, 60), rng.randrange(61, 120)
    gold = f"x^2+{a + b}x+{a * b}"
    right = (f"(x+{a})(x+{b})", f"x(x+{a + b})+{a * b}", f"{a * b}+{a + b}x+x^2", gold)
    wrong = (f"(x+{a})(x-{b})", f"x^2+{a * b}x+{a + b}", f"(x+{a})^2", f"x^2+{a + b}x")
    return Asked("math", gold, right, wrong)


def quotient(rng: random.Random) -> Asked:
    a, b = rng.randrange(40, 90), rng.randrange(2, 39)
    gold = rf"\frac{{x+{a}}}{{x+{b}}}"
    right = (
        rf"1+\frac{{{a - b}}}{{x+{b}}}", rf"\frac{{2x+{2 * a}}}{{2x+{2 * b}}}", f"(x+{a})/(x+{b})",
        rf"\frac{{-x-{a}}}{{-x-{b}}}",
    )  # fmt: skip
    wrong = (
        rf"\frac{{x+{b}}}{{x+{a}}}", rf"1-\frac{{{a - b}}}{{x+{b}}}", rf"\frac{{{a}}}{{{b}}}",
        rf"\frac{{x+{a}}}{{x-{b}}}",
    )  # fmt: skip
    return Asked("math", gold, right, wrong)


def finite_set(rng: random.Random) -> Asked:
    a, b, c = sorted(rng.sample(range(-200, 200), 3))
    right = (rf"\{{{c}, {a}, {b}\}}", f"{a}, {b}, {c}", rf"\{{{b}, {a}, {c}\}}", f"{c}, {b}, {a}")
    wrong = (rf"\{{{a}, {b}\}}", f"{a}, {b}, {c + 1}", f"{c}", rf"\{{{a}, {b}, {c}, {c + 2}\}}")
    return Asked("math", rf"\{{{a}, {b}, {c}\}}", right, wrong)


def interval(rng: random.Random) -> Asked:
    a, b = rng.randrange(-200, 0), rng.randrange(2, 300)
    half = rf"\frac{{{b}}}{{2}}"
    right = (f"[{a}, {b}/2)", f"[{a}, {b / 2})", rf"x \in [{a}, {half})", f"[{a},{half})")
    wrong = (f"({a}, {half})", f"[{a}, {half}]", f"[{a}, {b})", f"[{-a}, {b}0)")
    return Asked("math", f"[{a}, {half})", right, wrong)


def line(rng: random.Random) -> Asked:
    a, b = rng.randrange(2, 90), rng.randrange(2, 90)
    right = (f"{a}x - y + {b} = 0", f"2y = {2 * a}x + {2 * b}", f"y = {b} + {a}x", f"y-{a}x={b}")
    wrong = (f"y = {a}x - {b}", f"{a}x + y + {b} = 0", f"y = {b}x + {a + 1}", "y = y")
    return Asked("math", f"y = {a}x + {b}", right, wrong)


def inequality(rng: random.Random) -> Asked:
    a = rng.randrange(2, 900)
    right = (f"{a} < x", f"2x > {2 * a}", f"-x < -{a}", f"x > {a}.0")
    wrong = (f"x < {a}", rf"x \ge {a}", f"x > {a + 1}", f"2x > {a}")
    return Asked("math", f"x > {a}", right, wrong)


PLAIN: Sequence[Callable[[random.Random], Asked]] = (number, fraction)
SYMBOLIC: Sequence[Callable[[random.Random], Asked]] = (
    radical, polynomial, quotient, finite_set, interval, line, inequality,
)  # fmt: skip


class _Counted:
    """Workers that count what reaches them."""

    def __init__(self, workers: ProcessWorkers) -> None:
        self.workers, self.calls = workers, 0

    async def call(self, function: str, *arguments: Json, timeout_s: float) -> Json:
        self.calls += 1
        return await self.workers.call(function, *arguments, timeout_s=timeout_s)


def math_verdicts(quick: bool) -> dict[str, float]:
    """`math_per_s`, of the mix; `math_symbolic_share` of it that reached a worker;
    `math_symbolic_per_s`, of those tasks alone; `math_mistaken` verdicts.
    """
    return asyncio.run(_measured(tasks=24 if quick else 112, rounds=3 if quick else 7))


async def _measured(*, tasks: int, rounds: int) -> dict[str, float]:
    rng = random.Random("mathematics")
    async with ProcessWorkers(processes=PROCESSES) as workers:
        counted = _Counted(workers)
        stack = Stack(Tools(clock=RealClock(), workers=counted))
        await _round(stack, [make(rng) for make in SYMBOLIC * 2])
        counted.calls, mixed, alone, mistaken, asked = 0, [], [], 0, 0
        for _ in range(rounds):
            plain = [PLAIN[n % len(PLAIN)](rng) for n in range(tasks // 2)]
            symbolic = [SYMBOLIC[n % len(SYMBOLIC)](rng) for n in range(tasks // 2)]
            per_s, wrong = await _round(stack, [*plain, *symbolic])
            mixed.append(per_s)
            mistaken, asked = mistaken + wrong, asked + 2 * REPLIES * 2 * (tasks // 2)
        share = counted.calls / asked
        for _ in range(rounds):
            fresh = [SYMBOLIC[n % len(SYMBOLIC)](rng) for n in range(tasks // 2)]
            per_s, wrong = await _round(stack, fresh)
            alone.append(per_s)
            mistaken += wrong
    return {
        "math_per_s": round(statistics.median(mixed), 1),
        "math_per_s_worst": round(min(mixed), 1),
        "math_symbolic_share": round(share, 3),
        "math_symbolic_per_s": round(statistics.median(alone), 1),
        "math_mistaken": mistaken,
    }


async def _round(stack: Stack, tasks: Sequence[Asked]) -> tuple[float, int]:
    """Verdicts a second over all replies of these tasks, and how many were mistaken."""
    replies = [
        (_attempt(task, reply), worth)
        for task in tasks
        for worth, texts in ((1.0, task.right), (0.0, task.wrong))
        for reply in texts
    ]
    random.Random(len(tasks)).shuffle(replies)
    left, mistaken = iter(replies), 0

    async def ask() -> None:
        nonlocal mistaken
        for attempt, worth in left:
            mistaken += (await stack.verify(attempt, None)).reward != worth

    started_s = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    return len(replies) / (time.perf_counter() - started_s), mistaken


def _attempt(asked: Asked, reply: str) -> Trajectory:
    check = Check(kind=asked.kind, params={"answer": asked.gold})
    described = Description(objective="Work it out.")
    task = Task(domain="bench.math", level=0, seed=0, description=described, checks=(check,))
    key = AttemptKey(run="bench", draw=0, member=0)
    return Trajectory(key=key, task=task, turns=(Turn(text=reply),))
