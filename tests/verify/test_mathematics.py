import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from posttrain.core.clock import RealClock
from posttrain.core.errors import WorkerError
from posttrain.core.task import Check
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.verify.kinds import Subject, Tools
from posttrain.verify.mathematics import math


def judged(attempt, *pairs, **params):
    async def run():
        found = []
        async with ProcessWorkers() as workers:
            tools = Tools(clock=RealClock(), workers=workers)
            for gold, reply in pairs:
                check = Check(kind="math", params={"answer": gold, **params})
                found.append(await math(check, Subject(trajectory=attempt(reply)), tools))
        return found

    return asyncio.run(run())


def test_every_context_decides_alike_and_the_endless_end_BR_26(make_attempt):
    power = "(a+b+c+d+f+g)"  # the 90th has 57,940,519 terms
    pairs = [("1/3", r"\frac{1}{3}"), (r"7.5\%", r"7.5\%"), ("2", "3"), ("x+x", "2x"),
             (f"{power}^{{90}}", f"{power}^{{89}}(a+b+c)+{power}^{{89}}(d+f+g)")]  # fmt: skip

    def values():
        found = judged(make_attempt, *pairs, timeout_s=0.5)
        assert "ran past its time limit (1 s)" in found[-1].evidence["refused"]
        return [finding.value for finding in found]

    with ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(values) for _ in range(2)]
        assert [values(), *(one.result() for one in threads)] == [[1, 1, 0, 1, 0]] * 3


def test_an_expression_still_to_be_worked_out_is_no_number(make_attempt):
    found = judged(make_attempt, ("391", r"17 \times 23"), ("4", r"\sqrt{16}"), ("4", "4.0"))
    assert [finding.value for finding in found] == [0, 0, 1]


def test_a_gold_answer_that_cannot_be_parsed_is_the_verifiers_failure(make_attempt):
    with pytest.raises(WorkerError, match="gold"):
        judged(make_attempt, ("5 }", "5"))


def test_the_verifying_process_imports_no_mathematics():
    told = "import sys, posttrain.verify.stack; raise SystemExit('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], check=False).returncode == 0
