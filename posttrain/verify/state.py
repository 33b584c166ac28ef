"""Checks of the state an attempt left: one assertion about one place of its sealed workspace.

Nothing here runs what the attempt left: contents and entries are read through the seal, links are
never followed, and databases are opened by a process of their own in a killable worker. The one
thing that must stay true: a file that is missing, too large, unreadable as what it should be or
ruinous to its reader is the attempt's doing and pays 0, while a lost sandbox or worker is an error
and pays nothing.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from posttrain.core.errors import UsageError, VerifierError, nearest
from posttrain.core.task import Check, Entry, EntryKind, Json
from posttrain.verify import documents, sqlite_reader
from posttrain.verify.decided import decided
from posttrain.verify.declared import Declared
from posttrain.verify.kinds import Kind, Subject, Tools, allowed, seconds_of, text_of
from posttrain.verify.layers import Finding
from posttrain.verify.structure import Rules, compared, same_json

MAX_FILE_BYTES = 8 << 20
MAX_ENTRIES = 4_096
QUERY_CPU_S = 3
"""Processor time of a query, so that a busy machine decides nothing; it takes milliseconds."""
QUERY_WALL_FACTOR = 100
"""Its reader waits for nothing but the processor, so this only ends one that hangs; a factor that
load reaches would make `verifier_failed` of a slow view, which is worth 0.
"""
SQLITE_READER = "posttrain.verify.state:read_rows"
DOCUMENT_READER = "posttrain.verify.state:compare_document"
_OF_DOCUMENTS = ("expected", "ignore", "unordered", "absolute", "relative", "header")
_MISSING = Finding(value=0.0, evidence={"found": "no such regular file"})
_TOO_LARGE = Finding(value=0.0, evidence={"found": f"more than {MAX_FILE_BYTES} bytes"})


async def state(check: Check, subject: Subject, tools: Tools) -> Finding:
    """One assertion: `params.assert` names it, `path` its place, `expected` what must be there.

    `file_equals` (text; `normalise`: exact, strip, lines or sorted_lines), `document_equals` (value
    of a JSON, TOML, YAML, CSV, TSV or INI document; `format`, where the file's ending does not tell
    it, `header`, `ignore` and `unordered` (JSON Pointers, `*` for any name or index), `absolute`
    and `relative` tolerance of numbers, `pays`: all, or the share of places), `sqlite_rows`
    (`query`, rows; `normalise`: exact order, or sorted_lines), `file_absent`, `file_mode` (octal
    text), `tree_unchanged` (relative path → text of every file below `path`, and nothing else;
    `except`: paths that may differ).
    """
    name = text_of(check, "assert")
    if name not in _ASSERTIONS:
        raise UsageError(
            f"no state assertion {name!r}{nearest(name, _ASSERTIONS)}.",
            f"name one of {', '.join(_ASSERTIONS)}",
        )
    assertion, parameters = _ASSERTIONS[name]
    allowed(check, "assert", "path", *parameters)
    if subject.sealed is None:
        raise VerifierError("the attempt left no sealed file system to look at.")
    subject.sealed.ensure(text_of(check, "path"))
    return await assertion(check, subject, tools)


# --- contents ---------------------------------------------------------------------------------


async def _bytes(sealed: Declared, path: str) -> bytes | Finding:
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


async def _document_equals(check: Check, subject: Subject, tools: Tools) -> Finding:
    """In a worker: what was left may be laborious to read or to compare."""
    path, params = text_of(check, "path"), check.params
    how = str(params.get("format", "")) or documents.format_of(path)
    if params.get("pays", "all") not in ("all", "share"):
        raise UsageError(f"check 'state' pays 'all' or 'share', not {params['pays']!r:.80}.")
    if not isinstance(params.get("header", False), bool):
        raise UsageError(
            f"check 'state' wants true or false as 'header', not {params['header']!r}."
        )
    if "expected" not in params:
        raise UsageError("check 'state' wants the value of the document as 'expected'.")
    text = await _text(check, subject)
    if isinstance(text, Finding):
        return text
    order = {"format": how, **{key: params[key] for key in _OF_DOCUMENTS if key in params}}
    found = await decided(
        tools, DOCUMENT_READER, (text, order), ("", order), timeout_s=seconds_of(check)
    )
    if found.refused:
        return Finding(value=0.0, evidence={"found": found.refused})
    if "fault" in found.answer:
        raise UsageError(f"check 'state': {found.answer['fault']}")
    if "unreadable" in found.answer:
        return Finding(value=0.0, evidence={"found": found.answer["unreadable"]})
    told, share = found.answer["told"], found.answer["share"]
    value = share if params.get("pays") == "share" else float(not told)
    return Finding(value=value, evidence={"differences": told} if told else {})


def compare_document(text: str, order: Mapping[str, Json]) -> dict[str, Json]:
    """What differs between a document and `order["expected"]`; for workers only."""
    expected, how = order["expected"], order["format"]
    try:
        rules = Rules.of(
            order.get("ignore", ()), order.get("unordered", ()),
            absolute=order.get("absolute", 0.0), relative=order.get("relative", 0.0),
            texts=how in ("csv", "tsv", "ini"),
        )  # fmt: skip
        value = documents.read(text, how, header=order.get("header", False) is True)
    except UsageError as error:
        return {"fault": str(error)}
    except documents.Unreadable as why:
        return {"unreadable": str(why)}
    found = compared(expected, value, rules)
    return {"told": list(found.told), "share": found.equal / found.places if found.told else 1.0}


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
        QUERY_CPU_S,
        timeout_s=seconds_of(check, QUERY_CPU_S * QUERY_WALL_FACTOR),
    )
    if "refused" in answer:
        return Finding(value=0.0, evidence={"found": answer["refused"]})
    rows, expected = answer["rows"], [list(row) for row in check.params.get("expected", ())]
    if check.params.get("normalise", "exact") == "sorted_lines":
        rows, expected = sorted(rows, key=json.dumps), sorted(expected, key=json.dumps)
    equal = same_json(expected, rows)
    return Finding(value=float(equal), evidence={} if equal else {"rows": rows[:8]})


def read_rows(database: str, log: str, query: str, cpu_s: int) -> dict[str, Json]:
    """Rows of a query over database bytes (base64, with their write-ahead log); for workers only.

    A damaged database, a missing table, an endless view or one that crashes its reader is the
    attempt's doing: `{"refused": why}`.
    """
    order = {"database": database, "log": log, "query": query, "cpu_s": cpu_s}
    ended = subprocess.run(
        (sys.executable, "-I", "-S", "-B", sqlite_reader.__file__),
        input=json.dumps(order).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that it cleans up whatever ends this process
        check=False,
    )
    if ended.returncode != 0:
        return {"refused": f"its reader ended with {ended.returncode}"}
    answer: dict[str, Json] = json.loads(ended.stdout)
    return answer


# --- the tree ---------------------------------------------------------------------------------

Tree = Mapping[str, Entry]


async def _tree(subject: Subject) -> Tree | Finding:
    """Everything in the workspace by its path, or what too much of it is worth."""
    assert subject.sealed is not None
    found = await subject.sealed.entries(max_entries=MAX_ENTRIES + 1)
    if len(found) > MAX_ENTRIES:
        return Finding(value=0.0, evidence={"found": f"more than {MAX_ENTRIES} entries"})
    return {entry.path: entry for entry in found}


async def _file_absent(check: Check, subject: Subject, tools: Tools) -> Finding:
    tree = await _tree(subject)
    if isinstance(tree, Finding):
        return tree
    path = _clean(text_of(check, "path"))
    for place in (path, *map(str, PurePosixPath(path).parents)):
        entry = tree.get(place)
        if entry and (place == path or entry.kind is not EntryKind.FOLDER):
            return Finding(value=0.0, evidence={"found": f"{entry.kind.value} {place}"})
    return Finding(value=1.0)


async def _file_mode(check: Check, subject: Subject, tools: Tools) -> Finding:
    tree = await _tree(subject)
    if isinstance(tree, Finding):
        return tree
    entry = tree.get(_clean(text_of(check, "path")))
    if entry is None or entry.kind not in (EntryKind.FILE, EntryKind.FOLDER):
        return _MISSING
    right = entry.mode == int(text_of(check, "expected"), 8)
    return Finding(value=float(right), evidence={"mode": format(entry.mode, "o")})


async def _tree_unchanged(check: Check, subject: Subject, tools: Tools) -> Finding:
    tree = await _tree(subject)
    if isinstance(tree, Finding):
        return tree
    assert subject.sealed is not None
    root = _clean(text_of(check, "path"))
    expected = {_below(root, path): text for path, text in check.params["expected"].items()}
    spared = {_below(root, path) for path in check.params.get("except", ())}
    inside = [path for path in tree if root == "." or path.startswith(f"{root}/")]
    left = {path for path in inside if tree[path].kind is not EntryKind.FOLDER} - spared
    for path in sorted(left ^ (set(expected) - spared)):
        word = "added" if path in left else "missing"
        return Finding(value=0.0, evidence={"found": f"{path}: {word}"})
    for path in sorted(left):
        wanted = expected[path].encode()
        if await subject.sealed.read(path, max_bytes=len(wanted) + 1) != wanted:
            return Finding(value=0.0, evidence={"found": f"{path}: changed"})
    return Finding(value=1.0)


def _clean(path: str) -> str:
    """A workspace path in the form in which entries have it."""
    return str(PurePosixPath(path))


def _below(root: str, path: str) -> str:
    return str(PurePosixPath(root) / path)


_ASSERTIONS: Mapping[str, tuple[Kind, Sequence[str]]] = {
    "file_equals": (_file_equals, ("expected", "normalise")),
    "document_equals": (_document_equals, ("format", "pays", "timeout_s", *_OF_DOCUMENTS)),
    "sqlite_rows": (_sqlite_rows, ("expected", "normalise", "query", "timeout_s")),
    "file_absent": (_file_absent, ()),
    "file_mode": (_file_mode, ("expected",)),
    "tree_unchanged": (_tree_unchanged, ("expected", "except")),
}
"""Each with the parameters that it has beside its place."""
