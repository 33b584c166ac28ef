"""Attacks on verifiers as data: what is left, what it earns here, and whom it deceives.

Each has a positive control: a naive grader, run in a sandbox, that pays it, and that pays honest
work and nothing that is plainly wrong. The one thing that must stay true: an attack that no naive
grader pays proves nothing about the one that does not pay it either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.containment import ExecResult
from posttrain.core.task import Artefact, ArtefactKind, Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What an attempt leaves: a reply, code in it, files, and what commands make of them."""

    reply: str = ""
    code: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The reply, with the code as a block of it."""
        return f"{self.reply}\n```python\n{self.code}\n```\n" if self.code else self.reply

    @property
    def laid(self) -> dict[str, str]:
        """The files, with the code as solution.py."""
        return {**({"solution.py": self.code} if self.code else {}), **self.files}


@dataclass(frozen=True, slots=True, kw_only=True)
class Naive:
    """A grader without what protects ours: it looks at the same in the place where it was left."""

    command: tuple[str, ...]
    paid: Callable[[ExecResult], bool] = lambda ended: ended.exit_code == 0
    files: Mapping[str, str] = field(default_factory=dict)
    """Its own, laid beside what was left, unless that is already there (`kept`)."""
    kept: frozenset[str] = frozenset()
    """Those of its files that it takes as it finds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One way to be paid for nothing."""

    entry: int
    """Number in the catalogue of exploits."""
    name: str
    kind: str
    """Kinds of checks it is tried on."""
    held: str
    """The layer that stops it."""
    checks: tuple[Check, ...]
    left: Left
    honest: Left
    wrong: Left
    """What neither grader pays."""
    naive: Naive
    artefacts: tuple[Artefact, ...] = ()
    asked: Any = None
    """The judge model that is asked, where one is."""
    objective: str = "Do it."

    def __str__(self) -> str:
        return self.name


TREE = Artefact(name="all", kind=ArtefactKind.TREE, path=".")


def file(path: str) -> Artefact:
    """A declared file."""
    return Artefact(name=path, kind=ArtefactKind.FILE, path=path)


# --- naive graders that several families know -----------------------------------------------------

RUNNER = """
import test_it
failed = 0
for name, test in list(vars(test_it).items()):
    if name.startswith("test"):
        try:
            test()
        except Exception:
            failed += 1
raise SystemExit(1 if failed else 0)
"""
TESTS = """
from solution import total
def test_empty(): assert total([]) == 0
def test_one(): assert total([7]) == 7
def test_two(): assert total([2, 3]) == 5
def test_negative(): assert total([-4, 1]) == -3
def test_many(): assert total(list(range(50))) == 1225
"""
UNIT_TESTS = """
import unittest
from solution import total
class TotalTest(unittest.TestCase):
    def test_empty(self): self.assertEqual(total([]), 0)
    def test_two(self): self.assertEqual(total([2, 3]), 5)
    def test_negative(self): self.assertEqual(total([-4, 1]), -3)
"""


def in_process(**files: str) -> Naive:
    """Tests executed in the candidate's process; what counts is exit code 0."""
    laid = {"runner.py": RUNNER, "test_it.py": TESTS}
    laid |= {f"{name}.py": text for name, text in files.items()}
    return Naive(command=("python3", "runner.py"), files=laid)


UNITTEST = Naive(
    command=("python3", "-m", "unittest", "discover", "-p", "test_it.py"),
    files={"test_it.py": UNIT_TESTS},
)
