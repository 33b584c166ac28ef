from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest

from posttrain.core.errors import UsageError
from posttrain.core.task import Check, Oracle, Place, Task
from posttrain.domains.domain import (
    answer_oracle,
    answer_task,
    check_contract,
    exact,
    in_levels,
    numeric,
    tool_named,
)


@dataclass
class Sums:
    name: str = "own.sums"
    levels: int = 1
    changes: dict[str, object] = field(default_factory=dict)
    calls: int = 0

    def task(self, seed: int, level: int) -> Task:
        self.calls += 1
        task = answer_task(
            f"{seed} + 1 = ?",
            domain="own.sums",
            seed=seed,
            level=level,
            answer=str(seed + 1),
            check=numeric(seed + 1),
        )
        return dataclasses.replace(task, **self.changes)  # type: ignore[arg-type]

    def oracle(self, task: Task) -> Oracle:
        return answer_oracle(task)


def problems(**changes: object) -> str:
    return "; ".join(check_contract(Sums(changes=changes), seed=4, level=0))


def test_a_good_domain_has_no_problems() -> None:
    assert problems() == ""


def test_the_gold_answer_is_private() -> None:
    task = Sums().task(41, 0)
    assert task.private == {"answer": "42"}
    assert "42" not in task.description.objective
    assert Sums().oracle(task).turns[0].text == "42"


def test_each_breach_of_the_contract_is_told() -> None:
    empty = dataclasses.replace(Sums().task(4, 0).description, objective="  ")
    guard = Check(kind="not_empty", place=Place.GUARD, gate=True)
    assert "objective is empty" in problems(description=empty)
    assert "no check beyond guards" in problems(checks=(guard,))
    assert "wanted a task of (domain, seed, level)" in problems(level=2)
    assert "allows no tool" in problems(executor="tools")
    assert "no environment" in problems(executor="tools")
    assert "no JSON value" in problems(private={"answer": "5", "bad": float("nan")})
    assert "changes on its way through JSON" in problems(private={"answer": "5", 3: 4})


def test_a_task_that_differs_when_made_twice_is_told() -> None:
    class Fickle(Sums):
        def task(self, seed: int, level: int) -> Task:
            task = super().task(seed, level)
            return dataclasses.replace(task, private={"answer": str(self.calls)})

    assert "differs when made twice" in "; ".join(check_contract(Fickle(), seed=1, level=0))


def test_an_oracle_without_turns_or_with_a_foreign_tool_is_told() -> None:
    class Silent(Sums):
        def oracle(self, task: Task) -> Oracle:
            return Oracle(turns=())

    assert "the oracle has no turns" in check_contract(Silent(), seed=1, level=0)


def test_levels_and_tools_are_named_in_errors() -> None:
    with pytest.raises(UsageError, match=r"'own.sums' has levels 0 to 0, got 1"):
        in_levels(Sums(), 1)
    with pytest.raises(UsageError, match=r"unknown tool 'shel' \(did you mean 'shell'"):
        tool_named("shel")


def test_checks_name_kinds_with_texts_as_answers() -> None:
    assert exact("a", ignore_case=True).params == {"answer": "a", "ignore_case": True}
    assert numeric(3, absolute=0.1).params == {"answer": "3", "absolute": 0.1}
