"""Checks of the state an attempt left: one assertion about one place of its sealed workspace.

Nothing here runs what the attempt left. File contents are read through `Sealed.read`; what needs a
look at the tree itself (absence, modes, whole folders) is done by a small checker in a fresh
sandbox; databases are opened by a killable worker. The one thing that must stay true: a file that
is missing, too large or unreadable as what it should be is the attempt's doing and pays 0, while a
lost sandbox or worker is an error and pays nothing.
"""

from __future__ import annotations

import base64
import json
import sqlite3
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from posttrain.core.errors import UsageError, VerifierError, nearest
from posttrain.core.ports import Sealed
from posttrain.core.task import Check, Json
from posttrain.verify.execution import carry_out, finding
from posttrain.verify.kinds import Kind, Subject, Tools, allowed, seconds_of, text_of
from posttrain.verify.layers import Finding

MAX_FILE_BYTES = 8 << 20
MAX_ROWS = 10_000
TICK_STEPS, MAX_TICKS = 10_000, 5_000
"""A query may take 50 million steps of SQLite's machine: a view that never ends pays 0."""
SQLITE_READER = "posttrain.verify.state:read_rows"
_MISSING = Finding(value=0.0, evidence={"found": "no such regular file"})
_TOO_LARGE = Finding(value=0.0, evidence={"found": f"more than {MAX_FILE_BYTES} bytes"})


async def state(check: Check, subject: Subject, tools: Tools) -> Finding:
    """One assertion: `params.assert` names it, `path` its place, `expected` what must be there.

    `file_equals` (text; `normalise`: exact, strip, lines or sorted_lines), `json_equals` (value),
    `sqlite_rows` (`query`, rows; `normalise`: exact order, or sorted_lines), `file_absent`,
    `file_mode` (octal text), `tree_unchanged` (relative path → text of every file below `path`,
    and nothing else; `except`: paths that may differ).
    """
    allowed(check, "assert", "path", "expected", "normalise", "query", "except", "timeout_s")
    name = text_of(check, "assert")
    if subject.sealed is None:
        raise VerifierError("the attempt left no sealed file system to look at.")
    if name in _READ:
        return await _READ[name](check, subject, tools)
    if name in _LOOKED:
        return await _look(check, subject, tools)
    known = sorted({*_READ, *_LOOKED})
    raise UsageError(f"no state assertion {name!r}{nearest(name, known)}.", f"name one of {known}")


# --- contents ---------------------------------------------------------------------------------


async def _bytes(sealed: Sealed, path: str) -> bytes | Finding:
    """The file's bytes, or what its absence or size is worth."""
    data = await sealed.read(path, max_bytes=MAX_FILE_BYTES + 1)
    if data is None:
        return _MISSING
    return _TOO_LARGE if len(data) > MAX_FILE_BYTES else data


async def _text(check: Check, subject: Subject) -> str | Finding:
    assert subject.sealed is not None
    data = await _bytes(subject.sealed, text_of(check, "path"))
    if isinstance(data, Finding):
        return data
    try:
        return data.decode()
    except UnicodeDecodeError:
        return Finding(value=0.0, evidence={"found": "no UTF-8 text"})


async def _file_equals(check: Check, subject: Subject, tools: Tools) -> Finding:
    text = await _text(check, subject)
    if isinstance(text, Finding):
        return text
    how = str(check.params.get("normalise", "exact"))
    equal = normalised(text, how) == normalised(text_of(check, "expected"), how)
    return Finding(value=float(equal), evidence={} if equal else {"found": text[:200]})


async def _json_equals(check: Check, subject: Subject, tools: Tools) -> Finding:
    text = await _text(check, subject)
    if isinstance(text, Finding):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return Finding(value=0.0, evidence={"found": "no JSON"})
    equal = same_json(check.params.get("expected"), value)
    return Finding(value=float(equal), evidence={} if equal else {"found": text[:200]})


def normalised(text: str, how: str) -> str | list[str]:
    r"""Text in the form in which it is compared.

    `exact`: as it is; `strip`: without white space around it; `lines`: its lines without trailing
    white space, and without empty lines at the end; `sorted_lines`: those, sorted.

    >>> normalised("b \n\na\n\n", "lines"), normalised("b\na", "sorted_lines")
    (['b', '', 'a'], ['a', 'b'])

    Raises:
        UsageError: an unknown form.
    """
    if how == "exact":
        return text
    if how == "strip":
        return text.strip()
    lines = [line.rstrip() for line in text.rstrip().split("\n")]
    if how == "lines":
        return lines
    if how == "sorted_lines":
        return sorted(lines)
    known = ("exact", "strip", "lines", "sorted_lines")
    raise UsageError(f"no normalisation {how!r}{nearest(how, known)}.", f"name one of {known}")


def same_json(expected: Json, found: Json) -> bool:
    """Equality of JSON values: strict about types, except that 1 and 1.0 are one number.

    >>> same_json({"a": 1}, {"a": 1.0}), same_json([1], [True]), same_json(None, 0)
    (True, False, False)
    """
    if isinstance(expected, bool) or isinstance(found, bool) or expected is None or found is None:
        return expected is found
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        return set(expected) == set(found) and all(
            same_json(value, found[key]) for key, value in expected.items()
        )
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(expected) == len(found) and all(map(same_json, expected, found))
    if isinstance(expected, int | float) and isinstance(found, int | float):
        return expected == found
    return type(expected) is type(found) and bool(expected == found)


# --- databases --------------------------------------------------------------------------------


async def _sqlite_rows(check: Check, subject: Subject, tools: Tools) -> Finding:
    assert subject.sealed is not None
    if tools.workers is None:
        raise VerifierError("a database wants workers, but this stack was built without.")
    path = text_of(check, "path")
    data = await _bytes(subject.sealed, path)
    if isinstance(data, Finding):
        return data
    log = await subject.sealed.read(f"{path}-wal", max_bytes=MAX_FILE_BYTES)
    answer = await tools.workers.call(
        SQLITE_READER,
        base64.b64encode(data).decode(),
        base64.b64encode(log or b"").decode(),
        text_of(check, "query"),
        timeout_s=seconds_of(check),
    )
    if "refused" in answer:
        return Finding(value=0.0, evidence={"found": answer["refused"]})
    rows, expected = answer["rows"], [list(row) for row in check.params.get("expected", ())]
    if check.params.get("normalise", "exact") == "sorted_lines":
        rows, expected = sorted(rows, key=json.dumps), sorted(expected, key=json.dumps)
    equal = same_json(expected, rows)
    return Finding(value=float(equal), evidence={} if equal else {"rows": rows[:8]})


def read_rows(database: str, log: str, query: str) -> dict[str, Json]:
    """Rows of a query over database bytes (base64, with their write-ahead log); for workers only.

    A damaged database, a missing table or an endless view is the attempt's doing:
    `{"refused": why}`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy.db"
        path.write_bytes(base64.b64decode(database))
        if log:
            Path(f"{path}-wal").write_bytes(base64.b64decode(log))
        connection = sqlite3.connect(path)
        ticks = iter(range(MAX_TICKS))
        connection.set_progress_handler(lambda: next(ticks, None) is None, TICK_STEPS)
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA query_only = ON")
            rows = connection.execute(query).fetchmany(MAX_ROWS)
            return {"rows": [[_cell(cell) for cell in row] for row in rows]}
        except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        finally:
            connection.close()


def _cell(value: object) -> Json:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


# --- the tree ---------------------------------------------------------------------------------

_LOOKED = ("file_absent", "file_mode", "tree_unchanged")

_LOOK = '''
import os, stat

def place(root, path):
    """lstat of a path without following any link; None: nothing is there; str: why not."""
    current, found = root, os.lstat(root)
    for part in [part for part in path.split("/") if part not in ("", ".")]:
        if part == ".." or not stat.S_ISDIR(found.st_mode):
            return "a link or file in the path"
        current = os.path.join(current, part)
        try:
            found = os.lstat(current)
        except FileNotFoundError:
            return None
        except OSError as error:
            return error.strerror
    return found

def kind(mode):
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "neither"

def content(path, size):
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError:
        return None

def differences(root, expected, spared):
    """Relative paths that are missing, added, changed, or no regular file."""
    seen, unreadable = set(), []
    for folder, folders, names in os.walk(root, onerror=unreadable.append):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in names + links:
            full = os.path.join(folder, name)
            path = os.path.relpath(full, root)
            if path in spared:
                continue
            seen.add(path)
            if path not in expected:
                yield path + ": added"
            elif kind(os.lstat(full).st_mode) != "file":
                yield path + ": no regular file"
            elif content(full, len(expected[path]) * 4 + 1) != expected[path].encode():
                yield path + ": changed"
    for error in unreadable:
        yield str(error)
    for path in sorted(set(expected) - seen - set(spared)):
        yield path + ": missing"

def check(order):
    wanted = order.params
    found = place(order.artefacts, wanted["path"])
    if isinstance(found, str):
        return {"value": 0.0, "evidence": {"found": found}}
    if wanted["assert"] == "file_absent":
        return {"value": float(found is None)}
    if found is None:
        return {"value": 0.0, "evidence": {"found": "nothing"}}
    if wanted["assert"] == "file_mode":
        mode = format(stat.S_IMODE(found.st_mode), "o")
        right = kind(found.st_mode) != "neither" and mode == wanted["expected"]
        return {"value": float(right), "evidence": {"mode": mode}}
    root = os.path.join(order.artefacts, wanted["path"])
    for difference in differences(root, wanted["expected"], wanted["except"]):
        return {"value": 0.0, "evidence": {"found": difference}}
    return {"value": 1.0}
'''


async def _look(check: Check, subject: Subject, tools: Tools) -> Finding:
    expected = check.params.get("expected")
    if check.params["assert"] == "file_mode":
        expected = format(int(text_of(check, "expected"), 8), "o")
    params = {
        "assert": check.params["assert"],
        "path": text_of(check, "path"),
        "expected": expected,
        "except": list(check.params.get("except", ())),
    }
    looker = replace(
        check, params={"source": _LOOK, "params": params, "timeout_s": seconds_of(check)}
    )
    return finding(await carry_out(looker, subject, tools), None)


_READ: Mapping[str, Kind] = {
    "file_equals": _file_equals,
    "json_equals": _json_equals,
    "sqlite_rows": _sqlite_rows,
}
