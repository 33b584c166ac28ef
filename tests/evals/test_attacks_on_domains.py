"""Attacks on a tool domain, played for real: none is paid, and a naive check pays them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.core.clock import RealClock
from posttrain.core.task import Check, Environment, Oracle, Task
from posttrain.domains.families.terminal import domain
from posttrain.engine import model as models
from posttrain.evals import leaks
from posttrain.evals.attackers import COMMANDS, done, roomy
from posttrain.evals.played import player
from posttrain.rollout.render import Renderer
from posttrain.rollout.tokenizer import TransformersTokenizer
from posttrain.rollout.toolloop import ToolExecutor
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack
from tests.sandbox.conftest import machine

__all__ = ["machine"]

NAIVE = Check(kind="program", params={"source": """
import os
def check(order):
    root = str(order.artefacts)
    names = os.listdir(root)
    kept = [name for name in names if not name.startswith(".")]
    markers = [name for name in names if name.startswith(("reward", "result"))]
    linked = [name for name in names if os.path.islink(os.path.join(root, name))]
    planted = [name for name in names if name in ("conftest.py", "bin", "big")]
    closed = [n for n in names if not os.access(os.path.join(root, n), os.R_OK)]
    return bool(markers or linked or planted or closed or not kept)
"""})  # fmt: skip
"""Pays for what the attacks leave behind: shows that they were carried out."""
SILENT = {"killed"}
"""Attacks that leave nothing which could be seen."""


async def earned(source: BubblewrapSandboxes, task: Task, turns: Oracle, tmp_path: Path):
    clock = RealClock()
    tokenizer = models.load_tokenizer(models.random_model(tmp_path / "model"))
    renderer = Renderer(TransformersTokenizer(tokenizer))
    verifier = Stack(Tools(clock=clock, sandboxes=source))

    def executors(policy):
        return {"tools": ToolExecutor(policy, renderer, clock, source)}

    return await player(executors, renderer, verifier, clock)(task, turns)


def test_commands_that_solve_nothing_earn_nothing(machine, tmp_path: Path) -> None:
    task = roomy(domain("permissions", name="terminal.permissions").task(5, 0))
    naive = replace(task, checks=(NAIVE,))

    async def body() -> None:
        async with BubblewrapSandboxes() as source:
            for name, command in COMMANDS.items():
                made = await earned(source, task, done(task, command), tmp_path)
                assert made.reward == 0.0, (name, made.outcome, made.error)
                if name not in SILENT:
                    made = await earned(source, naive, done(task, command), tmp_path)
                    assert made.reward == 1.0, (name, made.verdict, made.turns)

    asyncio.run(body())


@pytest.mark.parametrize(("line", "found"), [("a line that tells it all", True), ("none", False)])
def test_a_leak_is_found_from_inside_after_the_set_up(machine, line: str, found: bool) -> None:
    environment = Environment(
        files={"a/b.txt": "x\n"}, setup=("echo 'so: a line that tells it all.' > a/made.txt",)
    )
    task = replace(domain("permissions", name="t").task(5, 0), environment=environment)

    async def body() -> None:
        async with BubblewrapSandboxes() as source:
            told = await leaks.searcher(source)(task, [line, "another line that is not there"])
            assert list(told) == ([line] if found else [])

    asyncio.run(body())
