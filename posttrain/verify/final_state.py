"""The kind `final_state`: did the attempt reach the state that reference actions reach?

As in tau-bench (Yao et al., 2024): what counts is the state at the end, however it was reached.
The reference actions run in a fresh sandbox of the task's environment, and both states are compared
as documents. The one thing that must stay true: the expected state is made by the reference alone;
where that fails, the check has failed, and nobody is paid 0 for it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from posttrain.core.errors import UsageError, VerifierError
from posttrain.core.task import Check, Json
from posttrain.verify import documents
from posttrain.verify.decided import decided
from posttrain.verify.documents import Unreadable
from posttrain.verify.kinds import Subject, Tools, allowed, seconds_of, text_of
from posttrain.verify.layers import Finding
from posttrain.verify.state import QUERY_CPU_S, QUERY_WALL_FACTOR, read_rows
from posttrain.verify.structure import Rules, compared

MAX_FILE_BYTES = 8 << 20
MAX_TABLES = 64
SQLITE = "sqlite"
JUDGE = "posttrain.verify.final_state:judged"
_SHAPE = (  # generated columns included (2, 3), as in SELECT *; 1 is hidden there too
    "SELECT m.type, m.name, i.name FROM sqlite_master AS m"
    " LEFT JOIN pragma_table_xinfo(m.name) AS i ON i.hidden <> 1"
    " WHERE m.name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY m.type, m.name, i.cid"
)
State = list[str]
"""A file that was left, and its write-ahead log, as base64."""


class _Readable(Protocol):
    async def read(self, path: str, *, max_bytes: int) -> bytes | None: ...


async def final_state(check: Check, subject: Subject, tools: Tools) -> Finding:
    """Whether a file that the attempt left holds what it holds after the reference actions.

    Params: `path` (a declared file, or one in a declared tree), `actions` (shell commands, each in
    a shell of its own, run over the task's environment), `format` (`sqlite`, or one that
    `document_equals` reads; the path's ending tells it: `.db`, `.sqlite`, `.json`, …), `ignore`,
    `unordered` (JSON Pointers, `*` for any name or index), `absolute`, `relative` (tolerance of
    numbers), `timeout_s`. A database is a document too: table → rows in any order, each row an
    object by column; its tables, views and triggers are compared by name.
    """
    allowed(check, "path", "actions", "format", "ignore", "unordered", "absolute", "relative",
            "timeout_s")  # fmt: skip
    path, how = text_of(check, "path"), _format(check)
    actions = check.params.get("actions")
    if not isinstance(actions, (list, tuple)) or not all(isinstance(one, str) for one in actions):
        raise UsageError(f"check 'final_state' wants a list of shell commands as 'actions', got "
                         f"{actions!r:.80}.")  # fmt: skip
    if subject.sealed is None:
        raise VerifierError("the attempt left no sealed file system to look at.")
    subject.sealed.ensure(path)
    order = {key: check.params[key] for key in ("ignore", "unordered", "absolute", "relative")
             if key in check.params} | {"format": how}  # fmt: skip
    _rules(order)
    left = await _state(subject.sealed, path)
    if left is None:
        why = f"no regular file of at most {MAX_FILE_BYTES} bytes"
        return Finding(value=0.0, evidence={"refused": why})
    reached = await _reached(path, actions, subject, tools)
    limit_s = seconds_of(check, QUERY_CPU_S * QUERY_WALL_FACTOR)
    found = await decided(
        tools, JUDGE, (left, reached, order), (reached, reached, order), timeout_s=limit_s
    )
    told = {"refused": found.refused} if found.refused else found.answer
    if "fault" in told:
        raise VerifierError(f"the reference leaves no state in {path!r}: {told['fault']}")
    wrong = bool(told.get("refused") or told.get("differences"))
    return Finding(value=float(not wrong), evidence=told)


def _format(check: Check) -> str:
    path = text_of(check, "path")
    if "format" in check.params:
        how = text_of(check, "format")
    elif path.endswith((".db", ".sqlite", ".sqlite3")):
        return SQLITE
    else:
        return documents.format_of(path)
    known = (SQLITE, "json", "toml", "yaml", "csv", "tsv", "ini")
    if how not in known:
        raise UsageError(f"check 'final_state' has no format {how!r:.40}.", f"name one of {known}")
    return how


def _rules(order: Mapping[str, Json]) -> Rules:
    """What does not count as a difference; rows of a database are in no order.

    Raises:
        UsageError: no lists of JSON Pointers, or no tolerances.
    """
    unordered = order.get("unordered", ())
    if order["format"] == SQLITE and isinstance(unordered, (list, tuple)):
        unordered = [*unordered, "/tables/*"]
    return Rules.of(
        order.get("ignore", ()), unordered, absolute=order.get("absolute", 0.0),
        relative=order.get("relative", 0.0), texts=order["format"] in ("csv", "tsv", "ini"),
    )  # fmt: skip


async def _state(place: _Readable, path: str) -> State | None:
    data = await place.read(path, max_bytes=MAX_FILE_BYTES + 1)
    log = await place.read(f"{path}-wal", max_bytes=MAX_FILE_BYTES)
    if data is None or len(data) > MAX_FILE_BYTES:
        return None
    return [base64.b64encode(one or b"").decode() for one in (data, log)]


async def _reached(path: str, actions: Sequence[str], subject: Subject, tools: Tools) -> State:
    """The state that the reference actions reach.

    Raises:
        VerifierError: an action fails, or leaves no such file.
    """
    environment = subject.task.environment
    if tools.sandboxes is None or environment is None:
        raise VerifierError("reference actions want an environment of the task, and sandboxes.")
    async with AsyncExitStack() as stack:
        async with tools.sandboxes.lease(environment) as sandbox:
            for action in actions:
                command = ("bash", "-c", action)
                ended = await sandbox.exec(command, timeout_s=environment.exec_timeout_s)
                if ended.exit_code != 0:
                    raise VerifierError(
                        f"reference action {action!r:.200} ended with {ended.cause} "
                        f"({ended.exit_code}): {ended.stderr[-300:]}"
                    )
            sealed = await sandbox.seal()
            stack.push_async_callback(sealed.close)  # before the lease ends, which takes time
        state = await _state(sealed, path)
    if state is None:
        raise VerifierError(f"the reference actions leave no regular file {path!r}.")
    return state


# --- in the worker ----------------------------------------------------------------------------


def judged(left: State, reached: State, order: Mapping[str, Json]) -> dict[str, Json]:
    """What differs between two states: `differences`, none where they are one; `refused`, why what
    was left is none; `fault`, why what was reached is none. For workers only.
    """
    rules, how = _rules(order), order["format"]
    try:
        expected = _document(reached, how)
    except Unreadable as error:
        return {"fault": str(error)}
    text = json.dumps(expected, sort_keys=True)
    told = {"reference": hashlib.sha256(text.encode()).hexdigest()[:16]}
    try:
        found = _document(left, how)
    except Unreadable as error:
        return {**told, "refused": str(error)}
    return {**told, "differences": list(compared(expected, found, rules).told)}


def _document(state: State, how: str) -> Json:
    """A state as a document.

    Raises:
        Unreadable: it is none.
    """
    if how == SQLITE:
        return _database(state)
    try:
        return documents.read(base64.b64decode(state[0]).decode(), how)
    except UnicodeDecodeError:
        raise Unreadable("no UTF-8 text") from None


def _database(state: State) -> Json:
    """`tables`, each with its rows by column, and `others`, the names of all else by kind."""
    columns: dict[str, list[str]] = {}
    others = []
    for kind, name, column in _rows(state, _SHAPE):
        if kind == "table":
            columns.setdefault(name, []).append(column)
        elif kind != "index":
            others.append(f"{kind} {name}")
    if len(columns) > MAX_TABLES:
        raise Unreadable(f"more than {MAX_TABLES} tables")
    tables = {}
    for name, names in columns.items():
        quoted = name.replace('"', '""')
        rows = _rows(state, f'SELECT * FROM "{quoted}"')
        tables[name] = [dict(zip(names, row, strict=True)) for row in rows]
    return {"tables": tables, "others": sorted(set(others))}


def _rows(state: State, query: str) -> list[list[Json]]:
    answer = read_rows(state[0], state[1], query, QUERY_CPU_S)
    if "refused" in answer:
        raise Unreadable(str(answer["refused"]))
    rows: list[list[Json]] = answer["rows"]
    return rows
