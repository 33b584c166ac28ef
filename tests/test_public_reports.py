"""`docs/PUBLIC_REPORTS.md` names tests that exist and that name the report."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = (TESTS.parent / "docs" / "PUBLIC_REPORTS.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (BR-\d+) \|.*$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_of_the_table_exists() -> None:
    known: dict[str, set[str]] = {}
    for file, name in NAMED.findall(TABLE):
        assert name in known.setdefault(file, functions(TESTS / file)), f"{file}::{name}"
    assert len(known) > 10


def test_every_row_has_a_test_in_a_file_that_names_the_report() -> None:
    rows = {match[1]: NAMED.findall(match[0]) for match in ROW.finditer(TABLE)}
    assert len(rows) == 29
    for report, named in rows.items():
        texts = [(TESTS / file).read_text(encoding="utf-8") for file, _ in named]
        spelt = (report, report.replace("-", "_"))
        assert any(one in text for text in texts for one in spelt), report
