"""Answers of public data sets: the oracle is paid, what is nearly right is not."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from posttrain.core.clock import RealClock
from posttrain.core.task import Check
from posttrain.evals.mutants import of_answer
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.verify import quantities
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack

DATA = Path(__file__).parents[3] / "shared" / "data"


def records(name):
    file = DATA / name
    if not file.exists():
        pytest.skip(f"no {name}")
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def test_gsm8k_pays_its_answers_and_no_mutant(make_attempt):
    rows = records("gsm8k/test.jsonl")[::3]

    async def counted():
        stack, found = Stack(Tools(clock=RealClock())), Counter()
        for row in rows:
            gold = row["answer"].rpartition("####")[2].strip()
            for kind in ("numeric", "math"):
                check = Check(kind=kind, params={"answer": gold})
                texts = {gold: "oracle"} | {one.text: "mutant" for one in of_answer(gold)}
                for text, of in texts.items():
                    verdict = await stack.verify(make_attempt(text, checks=(check,)), None)
                    found[of, verdict.reward] += 1
        return found

    found = asyncio.run(counted())
    assert found["oracle", 1.0] == 2 * len(rows)
    assert {pair for pair in found if found[pair]} == {("oracle", 1.0), ("mutant", 0.0)}


def test_options_of_aqua_are_told_apart(make_attempt):
    """Amounts, expressions and lists as people write them; words are refused as gold answers."""

    async def counted():
        found = Counter()
        async with ProcessWorkers() as workers:
            stack = Stack(Tools(clock=RealClock(), workers=workers))
            for row in records("aqua/test.jsonl"):
                options = {one[0]: one[2:].strip() for one in row["options"]}
                gold = options.pop(row["correct"])
                kind = "math" if quantities.amount(gold) is None else "numeric"
                check = Check(kind=kind, params={"answer": gold})
                own = await stack.verify(make_attempt(gold, checks=(check,)), None)
                found["oracle", own.reward] += 1
                for other in set(options.values()) - {gold} if own.reward else ():
                    verdict = await stack.verify(make_attempt(other, checks=(check,)), None)
                    found["other", verdict.reward] += 1
        return found

    found = asyncio.run(counted())
    assert found["oracle", 0.0] == found["other", None] == 0
    assert found["oracle", 1.0] > 200
    assert found["oracle", None] < 50
    assert found["other", 1.0] <= 2, "a list in another order is the same set"
    assert found["other", 0.0] > 800
