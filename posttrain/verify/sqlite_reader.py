"""Reads rows of a database that an attempt left; run by `state` as a process of its own.

Standard library only, started as a script. The file is hostile: its views and expressions are
programs that can take any time and memory, and damage can crash the library. The one thing that
must stay true: what a file does to this process stays in it, and is told by its end; the copy of it
that lies on the disk goes in any case, for another process, which looks at none of it, removes it.
"""

from __future__ import annotations

import base64
import json
import math
import os
import resource
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any

MAX_ROWS = 10_000
MAX_CELL_BYTES = 1 << 20
MAX_ANSWER_BYTES = 8 << 20
MAX_MEMORY_BYTES = 1 << 30
MAX_SPILLED_BYTES = 64 << 20
"""Size of each file it writes: sorting may spill to disk."""


def main() -> None:
    """One order in, one JSON object out. Order: `database` and `log` (base64), `query`, `cpu_s`."""
    order = json.loads(sys.stdin.read())
    with tempfile.TemporaryDirectory() as folder:
        if (pid := os.fork()) == 0:
            code = 1
            try:
                _answer(Path(folder), **order)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
    sys.exit(abs(os.waitstatus_to_exitcode(status)))


def _answer(folder: Path, *, cpu_s: int, **order: Any) -> None:
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: MAX_MEMORY_BYTES,
        resource.RLIMIT_FSIZE: MAX_SPILLED_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    try:
        answer: dict[str, Any] = {"rows": rows(folder, **order)}
    except (sqlite3.Error, ValueError, OverflowError, MemoryError) as error:
        answer = {"refused": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()


def rows(folder: Path, database: str, log: str, query: str) -> list[list[Any]]:
    """Rows of the query over database bytes with their write-ahead log, laid in a folder.

    Raises:
        sqlite3.Error, ValueError, OverflowError, MemoryError: the file does not give them.
    """
    path = folder / "copy.db"
    path.write_bytes(base64.b64decode(database))
    if log:
        Path(f"{path}-wal").write_bytes(base64.b64decode(log))
    connection = sqlite3.connect(path)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA query_only = ON")
        return _bounded(connection.execute(query))
    finally:
        connection.close()


def _bounded(cursor: sqlite3.Cursor) -> list[list[Any]]:
    found: list[list[Any]] = []
    size_bytes = 0
    for row in cursor:
        found.append([_cell(cell) for cell in row])
        size_bytes += len(json.dumps(found[-1]))
        if len(found) > MAX_ROWS or size_bytes > MAX_ANSWER_BYTES:
            raise ValueError(f"more than {MAX_ROWS} rows or {MAX_ANSWER_BYTES} bytes")
    return found


def _cell(cell: Any) -> Any:
    if isinstance(cell, bytes):
        return {"hex": cell.hex()}
    if isinstance(cell, float) and not math.isfinite(cell):
        return {"real": str(cell)}
    return cell


if __name__ == "__main__":
    main()
