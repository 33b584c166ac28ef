"""The suite as a whole: how many, each once, whole programs, and on the page as it is."""

import builtins
import dis
import importlib
import inspect
import types
from pathlib import Path

import pytest

from tests.sandbox.attacks import probe, table


def test_the_page_says_of_the_attacks_what_the_suite_has():
    """After a change: python -m tests.sandbox.attacks.table."""
    assert table.PAGE.read_text(encoding="utf-8") == table.page()


def test_each_mechanism_counts_once():
    attacks = table.attacks()
    assert len(attacks) >= 60
    for kind in ("name", "primitive"):
        seen = [getattr(attack, kind) for attack in attacks]
        assert len(set(seen)) == len(seen), kind


def test_no_family_is_forgotten():
    files = {path.stem for path in Path(__file__).parent.glob("test_*.py")}
    assert files == {f"test_{name}" for name in table.FAMILIES} | {"test_table"}


def global_names(code: types.CodeType) -> set[str]:
    """What a function and those in it take from its module."""
    steps = [step for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    names = {step.argval for step in steps if step.argval[0] != "@"}  # Those are of pytest.
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names |= global_names(inner)
    return names


@pytest.mark.parametrize("family", table.FAMILIES)
def test_programs_have_all_that_they_name_in_the_text_that_is_sent_along(family):
    """A tool that removes imports nobody uses once removed those that only programs use."""
    module = importlib.import_module(f"tests.sandbox.attacks.test_{family}")
    programs = [
        function for function in vars(module).values()
        if inspect.isfunction(function) and function.__module__ == module.__name__
        and list(inspect.signature(function).parameters) == ["given"]
    ]  # fmt: skip
    assert programs
    for function in programs:
        missing = global_names(function.__code__) - set(vars(probe)) - set(vars(builtins))
        assert not missing, (function.__name__, missing)
