"""Programs with checks, from public data sets beside the project; absent ones are no programs.

`../shared/data`: HumanEval and MBPP (each a function with a `check` of asserts) and QuixBugs (a
function with cases). The one thing that must stay true: what a check is made of here is in the data
set, but for the inputs of a differential check, which are varied from those of the data set.
"""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.task import Check

DATA = Path(__file__).parents[2] / "shared" / "data"
TIMEOUT_S = 1
_GENERATOR = '''
def generate(rng):
    return tuple(varied(rng, value) for value in rng.choice(GIVEN))


def varied(rng, value):
    """The value, or one of its kind that is near it."""
    if rng.random() < 0.3:
        return value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, rng.randrange(-3, 10)))
    if isinstance(value, float):
        return rng.choice((value + 0.5, -value, round(rng.uniform(-9, 30), 2)))
    if isinstance(value, str):
        return "".join(of_items(rng, list(value), lambda _, c: rng.choice((c, *value))))
    if isinstance(value, (list, tuple)):
        return type(value)(of_items(rng, list(value), varied))
    if isinstance(value, dict):
        return {key: varied(rng, part) for key, part in value.items()}
    return value


def of_items(rng, items, change):
    how = rng.randrange(5)
    if how == 0 or not items:
        return items[: rng.randrange(len(items) + 1)]
    at = rng.randrange(len(items))
    if how == 1:
        return items[:at] + [items[at]] + items[at:]
    if how == 2:
        rng.shuffle(items)
        return items
    items[at] = change(rng, items[at])
    return items
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A right solution and what it is judged by."""

    name: str
    source: str
    function: str
    suite: str
    inputs: Sequence[Sequence[Any]]
    """Arguments that the data set has."""
    cases: Sequence[tuple[Sequence[Any], Any]] = ()
    """Arguments and results, where they are plain JSON."""

    @property
    def checks(self) -> Mapping[str, Check]:
        """By kind."""
        found = {"suite": {"suite": self.suite}}
        if self.inputs:
            found["differential"] = self.differential(32)
        if self.cases:
            cases = [[json.dumps(given), json.dumps(result)] for given, result in self.cases]
            found["stdio"] = {"cases": cases}
        return {
            kind: Check(kind=kind, params={"timeout_s": TIMEOUT_S, **params})
            for kind, params in found.items()
        }

    def differential(self, count: int) -> dict[str, Any]:
        """Parameters of a check by so many inputs near those of the data set."""
        given = [tuple(row) for row in self.inputs]
        return {
            "generator": f"GIVEN = {given!r}\n{_GENERATOR}", "reference": self.source,
            "function": self.function, "count": count, "timeout_s": TIMEOUT_S,
        }  # fmt: skip

    def written(self, source: str, kind: str) -> str:
        """A reply with a solution, as the kind wants it."""
        printed = f"import json\nprint(json.dumps({self.function}(*json.loads(input()))))\n"
        return f"```python\n{source}\n{printed if kind == 'stdio' else ''}```\n"


def data_sets() -> dict[str, list[Program]]:
    """Programs of each data set that is there."""
    found = {
        "humaneval": _checked("humaneval/HumanEval.jsonl"),
        "mbpp": _checked("mxeval/mbpp.jsonl.gz"),
        "quixbugs": _quixbugs("quixbugs/quixbugs_python.jsonl"),
    }
    return {name: programs for name, programs in found.items() if programs}


def _rows(path: str) -> Iterator[dict[str, Any]]:
    file = DATA / path
    if file.exists():
        data = gzip.decompress(file.read_bytes()) if path.endswith(".gz") else file.read_bytes()
        yield from map(json.loads, filter(None, data.decode().split("\n")))


def _checked(path: str) -> list[Program]:
    """Those whose solution is one function, judged by a `check(candidate)`."""
    return [
        Program(
            name=row["task_id"], function=row["entry_point"],
            source=row["prompt"] + row["canonical_solution"],
            suite=f"from solution import {row['entry_point']}\n{row['test']}\n"
            f"def test_all():\n    check({row['entry_point']})\n",
            inputs=_inputs(row["test"]),
        )
        for row in _rows(path) if row.get("canonical_solution")
    ]  # fmt: skip


def _inputs(test: str) -> list[list[Any]]:
    """Arguments of the calls of `candidate` that are written out."""
    found = []
    for node in ast.walk(ast.parse(test)):
        match node:
            case ast.Call(func=ast.Name(id="candidate"), args=args, keywords=[]):
                try:
                    found.append([ast.literal_eval(one) for one in args])
                except (ValueError, TypeError, SyntaxError):
                    continue
    return found


def _quixbugs(path: str) -> list[Program]:
    return [_from_cases(row) for row in _rows(path) if row["has_io"]]


def _from_cases(row: Mapping[str, Any]) -> Program:
    name, source = row["name"], row["fixed"]
    if "yield" in source:
        source += f"\n_each = {name}\ndef {name}(*given):\n    return list(_each(*given))\n"
    tests = (
        f"def test_{n}():\n    assert {name}(*{given!r}) == {result!r}\n"
        for n, (given, result) in enumerate(row["io_tests"])
    )
    return Program(
        name=name, source=source, function=name, inputs=[given for given, _ in row["io_tests"]],
        suite=f"from solution import {name}\n" + "".join(tests),
        cases=[(given, result) for given, result in row["io_tests"]],
    )  # fmt: skip
