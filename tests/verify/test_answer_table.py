"""The table "Answers" of docs/CHECKS.md, row by row."""

import asyncio
import re
import tomllib
from pathlib import Path

from posttrain.core.clock import RealClock
from posttrain.core.task import Check
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack

PAGE = (Path(__file__).parents[2] / "docs" / "CHECKS.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"\| `(numeric|math)`(?:, `([^`]*)`)? \| `([^`]*)` \| `([^`]*)` \| (paid|0|failed) \|"
)
PROCESSES = 2


def rows():
    section = PAGE[PAGE.index("\n## Answers") :].split("\n## ")[1]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    found = [ROW.match(line) for line in lines]
    assert all(found), [line for line, one in zip(lines, found, strict=True) if one is None]
    return [one.groups(default="") for one in found]


def test_every_row_is_decided_as_the_page_says(make_attempt):
    async def decided():
        async with ProcessWorkers(processes=PROCESSES) as workers:
            stack, turn = Stack(Tools(clock=RealClock(), workers=workers)), asyncio.Semaphore(2)

            async def one(kind, params, gold, reply, _):
                params = {"answer": gold} | tomllib.loads(params)
                check = Check(kind=kind, params=params)
                async with turn:
                    verdict = await stack.verify(make_attempt(reply, checks=(check,)), None)
                if verdict.reward is None:
                    return "failed"
                assert "no answer came" not in str(verdict.components), "it hung"
                return {0.0: "0", 1.0: "paid"}[verdict.reward]

            return await asyncio.gather(*(one(*row) for row in rows()))

    assert len(rows()) > 120
    found = asyncio.run(decided())
    assert [(*row[:4], got) for row, got in zip(rows(), found, strict=True) if got != row[4]] == []
