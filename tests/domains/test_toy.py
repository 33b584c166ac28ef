from __future__ import annotations

import pytest

from posttrain.core.errors import UsageError
from posttrain.domains.domain import check_contract
from posttrain.domains.families import toy


@pytest.mark.parametrize("kind", sorted(toy.KINDS))
def test_toys_keep_the_contract_at_every_level(kind: str) -> None:
    domain = toy.domain(kind, name=f"toy.{kind}")
    for level in range(domain.levels):
        for seed in range(20):
            assert check_contract(domain, seed=seed, level=level) == ()


def test_every_answer_can_be_read_off_the_prompt() -> None:
    for kind in toy.KINDS:
        for level in range(3):
            task = toy.domain(kind, name=f"toy.{kind}").task(8, level)
            assert set(task.private["answer"]) <= set(task.description.objective)


def test_toys_take_no_parameters() -> None:
    with pytest.raises(UsageError, match=r"'toy\.digit' takes no params"):
        toy.domain("digit", name="mine", params={"a": 1})
