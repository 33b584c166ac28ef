"""A workspace on disk for trusted oracle commands, and its own reading of `state` assertions."""

from __future__ import annotations

import json
import sqlite3
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

from posttrain.core.task import Check, Json, Task


def lay(task: Task, root: Path) -> None:
    assert task.environment is not None
    for path, text in task.environment.files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    run(task.environment.setup, root)


def run(commands: Sequence[str], root: Path) -> None:
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=root, capture_output=True, text=True, timeout=20
        )
        assert done.returncode in (0, 1), (command, done.stderr)


def reward(task: Task, root: Path) -> float:
    """Gates times the mean of the goals."""
    gates = [holds(check, root) for check in task.checks if check.gate]
    goals = [holds(check, root) for check in task.checks if not check.gate]
    assert goals
    return float(all(gates)) * sum(goals) / len(goals)


def holds(check: Check, root: Path) -> bool:
    params = check.params
    path, expected = root / params["path"], params.get("expected")
    match params["assert"]:
        case "file_absent":
            return not path.exists()
        case "file_equals":
            return path.is_file() and same(path.read_text(), expected, params["normalise"])
        case "file_mode":
            return path.exists() and format(stat.S_IMODE(path.stat().st_mode), "o") == expected
        case "document_equals":
            return path.is_file() and json.loads(path.read_text()) == expected
        case "sqlite_rows":
            return rows(path, params["query"]) == expected
        case "tree_unchanged":
            found = {str(p.relative_to(path)): p for p in path.rglob("*") if p.is_file()}
            for spared in params["except"]:
                found.pop(spared, None)
            return {name: file.read_bytes().decode() for name, file in found.items()} == expected
    raise AssertionError(f"no assertion {params['assert']}")


def same(text: str, expected: str, how: str) -> bool:
    if how == "exact":
        return text == expected
    lines, wanted = text.rstrip().split("\n"), expected.rstrip().split("\n")
    if how == "sorted_lines":
        lines, wanted = sorted(lines), sorted(wanted)
    return [line.rstrip() for line in lines] == [line.rstrip() for line in wanted]


def rows(path: Path, query: str) -> list[list[Json]] | None:
    connection = sqlite3.connect(path)
    try:
        return [list(row) for row in connection.execute(query)]
    except sqlite3.Error:
        return None
    finally:
        connection.close()
