"""Mutants are what they say, and the checks that run programs tell them from right ones."""

import ast
import asyncio

import pytest

from posttrain.core.clock import RealClock
from posttrain.core.task import Check, Description, Oracle, OracleTurn, Place, Task, ToolCall
from posttrain.core.verdict import Component
from posttrain.evals.kills import Judged, counted
from posttrain.evals.mutants import of_answer, of_oracle, of_program, some
from posttrain.evals.suite import spoken
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.pooled import PooledSandboxes
from posttrain.verify.kinds import Tools
from posttrain.verify.stack import Stack
from tests.sandbox.conftest import machine

__all__ = ["machine"]

CLAMPED = """def clamped(values, low, high):
    found = []
    for index in range(len(values)):
        value = values[index]
        if value < low or not value <= high:
            continue
        found.append(value * 2 + 1)
    return found
"""


def test_every_operator_has_its_places_and_each_mutant_differs():
    mutants = of_program(CLAMPED)
    assert {mutant.operator for mutant in mutants} == {
        "statement", "boundary", "comparison", "boolean", "negation", "arithmetic", "constant",
        "condition", "return value", "off by one",
    }  # fmt: skip
    texts = [mutant.text for mutant in mutants]
    assert len(set(texts)) == len(texts)
    assert ast.unparse(ast.parse(CLAMPED)) not in texts
    for text in texts:
        compile(text, "mutant", "exec")
    assert "value * 2 - 1" in " ".join(texts)
    assert "range(len(values) + 1)" in " ".join(texts)
    assert mutants == of_program(CLAMPED)


@pytest.mark.parametrize(
    ("source", "operator", "mutant"),
    [
        ("x = True", "constant", "x = False"),
        ("x = a is None", "comparison", "x = a is not None"),
        ("x = -1", "negation", "x = 1"),
        ("x += 'a'", "constant", "x += 'ax'"),
        ("def f():\n    0\n    raise E", "statement", "def f():\n    0\n    pass"),
        ("f = lambda a: a if a else 0", "condition", "f = lambda a: a if not a else 0"),
    ],
)  # fmt: skip
def test_one_place_one_change(source, operator, mutant):
    assert (operator, mutant) in [(one.operator, one.text) for one in of_program(source)]


def test_what_says_nothing_and_what_gives_nothing_has_no_mutants():
    assert of_program('"""Only words."""\ndef f():\n    return None') == []
    assert of_answer("") == of_answer("?!") == []


def test_calls_of_a_reference_solution_are_left_out_and_changed():
    call = ToolCall(id="1", name="shell", arguments={"command": "chmod 644 a", "times": 2})
    oracle = Oracle(turns=(OracleTurn(tool_calls=(call,)), OracleTurn(text="Done.")))
    made = dict(of_oracle(oracle, executor="tools"))
    assert [turns for what, turns in made.items() if what.startswith("call")] == [
        Oracle(turns=oracle.turns[1:])
    ]
    given = [turns.turns[0].tool_calls[0].arguments for turns in made.values() if turns.turns[1:]]
    assert {"command": "chmod 645 a", "times": 2} in given
    assert {"command": "chmod 644 a", "times": 3} in given
    assert [t.turns[-1].text for _, t in of_oracle(oracle, executor="answer")] == ["Donf."]


def test_a_sample_is_the_same_for_the_same_seed():
    assert (
        some(range(99), 5, seed="a") == some(range(99), 5, seed="a") != some(range(99), 5, seed=1)
    )
    assert some(range(3), 5, seed=0) == [0, 1, 2]


def test_what_was_not_judged_counts_neither_way():
    kills = counted(
        [Judged(name="a", reward=None), Judged(name="b", reward=0.5), Judged(name="c", reward=1.0)]
    )
    assert (kills.judged, kills.killed, kills.unjudged, kills.alive) == (2, 1, 1, ("c",))
    assert counted([]).rate is None


def test_a_verifier_kills_by_any_of_its_checks_and_guards_do_not_count():
    def part(verifier, value, place=Place.DETERMINISTIC):
        return Component(name="c", place=place, value=value, verifier=f"{verifier}#params")

    same = (part("state@1", 1.0), part("state@1", 0.0), part("exact@1", 1.0))
    odd = (part("echo@1", 0.0, Place.GUARD), part("exact@1", None))
    kills = counted([Judged(name="a", reward=0.5, components=(*same, *odd))])
    assert {one.verifier: (one.judged, one.killed) for one in kills.by_verifier} == {
        "state@1": (1, 1), "exact@1": (1, 0),
    }  # fmt: skip


# --- the verifiers themselves -----------------------------------------------------------------

SUITE = """from solution import clamped
def test_empty(): assert clamped([], 0, 1) == []
def test_inside(): assert clamped([3, 1, 2], 1, 3) == [7, 3, 5]
def test_bounds(): assert clamped([0, 1, 3, 4], 1, 3) == [3, 7]
"""
DRIVER = "import json\nprint(json.dumps(clamped(*json.loads(input()))))\n"
CASES = [["[[0, 4, 1, 3], 1, 3]", "[3, 7]"], ["[[], 0, 1]", "[]"]]
GENERATOR = """def generate(rng):
    return [rng.randrange(9) for _ in range(rng.randrange(6))], 2, 6
"""
BY_PROGRAMS = {
    "suite": (CLAMPED, Check(kind="suite", params={"suite": SUITE, "timeout_s": 1})),
    "stdio": (CLAMPED + DRIVER, Check(kind="stdio", params={"cases": CASES, "timeout_s": 1})),
    "differential": (
        CLAMPED,
        Check(kind="differential", params={"generator": GENERATOR, "reference": CLAMPED,
              "function": "clamped", "count": 16, "timeout_s": 1}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BY_PROGRAMS)
def test_no_mutant_of_a_solution_is_paid_by_a_check_that_covers_it(kind, machine):
    source, check = BY_PROGRAMS[kind]
    mutants = of_program(CLAMPED)
    assert len(mutants) > 20
    rest = source.removeprefix(CLAMPED)

    async def main():
        clock, description = RealClock(), Description(objective="Write it.")
        task = Task(domain="x", level=0, seed=0, description=description, checks=(check,))
        async with BubblewrapSandboxes() as made, PooledSandboxes(made, clock) as sandboxes:
            # One draw in thirty has no value on one of the bounds.
            stack = Stack(Tools(clock=clock, sandboxes=sandboxes, seeds=lambda _: 5))

            async def judged(text):
                attempt = spoken(task, f"```python\n{text}\n{rest}```\n")
                return (await stack.verify(attempt, None)).reward

            assert await judged(CLAMPED) == 1.0
            return await asyncio.gather(*(judged(mutant.text) for mutant in mutants))

    rewards = asyncio.run(main())
    alive = [mutant for mutant, reward in zip(mutants, rewards, strict=True) if reward != 0.0]
    assert alive == []
