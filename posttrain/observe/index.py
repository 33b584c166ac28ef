"""The index of a run: `index.sqlite`, tables made from ledger, reviews and journal.

It holds nothing of its own: it is brought up to date by reading on where it stopped, and made anew
where its schema is another one, it is damaged, or a file it was made from no longer begins as it
did. Bodies stay in the journal. The one thing that must stay true: a reading of new lines and the
places up to which was read are one transaction, so an index made in pieces equals one made at once.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert

from posttrain.core import seeds
from posttrain.core.errors import LedgerError, PreflightError
from posttrain.observe.journal import FileJournal, decode_note

SCHEMA_VERSION = 1
REVIEWS = "review.jsonl"
"""The second file of ledger events in a run folder, written by whoever reviews."""
BATCH = 2_000
"""Lines whose effects are held in memory."""
MARK_BYTES = 4_096
"""So much before the place where reading stopped must be unchanged."""
SKETCH_CHARS, LEAST_WORDS = 20_000, 12
"""A sketch is made of so much of a text at most, and of so many words at least."""

_METADATA = sa.MetaData()


def _table(
    name: str, *, keys: str = "", text: str = "", whole: str = "", real: str = "", find: str = ""
) -> sa.Table:
    """A table by the names of its columns; those in `find` have an index."""
    columns = [
        sa.Column(column, kind, primary_key=column in keys.split(), index=column in find.split())
        for kind, names in ((sa.Text, text), (sa.Integer, whole), (sa.Float, real))
        for column in names.split()
    ]
    return sa.Table(name, _METADATA, *columns)


files = _table("files", keys="path", text="path mark", whole="read")
draws = _table("draws", keys="draw", whole="draw level seed", text="domain phase")
attempts = _table(
    "attempts",
    keys="key",
    text="key domain phase outcome stop place verifiers dropped verdict_place sketch",
    whole="draw member level seed tries ended tokens step judged chars",
    real="reward first_reward chance",
    find="draw domain step",
)
"""`ended`: where in the ledger it finished; `judged`: how often; `first_reward`: by the first of
these verdicts; `chars`, `sketch`: of what the policy said; `chance`: its key as a number in [0, 1).
"""
components = _table(
    "components",
    text="key name place error verifier",
    whole="gate",
    real="value weight",
    find="key",
)
reviews = _table(
    "reviews", keys="file at", whole="at", text="file kind key author label event", find="key"
)
"""Labels, claims, declines, corrections and controls, as encoded events; in order of (file, at)."""
evaluations = _table(
    "evaluations", keys="point domain", text="point domain weights", whole="n passed lost"
)
steps = _table(
    "steps", keys="step", text="phase", whole="step version attempts tokens", real="loss wall_s"
)
"""As the journal told it last: of a step that was made again after a resume, the later one."""

_Op = tuple[sa.Executable, dict[str, Any]]


def _upsert(table: sa.Table) -> sa.Executable:
    made = insert(table)
    changed = {column.name: made.excluded[column.name] for column in table.c}
    return made.on_conflict_do_update(index_elements=list(table.primary_key), set_=changed)


def _update(*names: str, **values: Any) -> sa.Executable:
    """Change these columns of the attempt `of`."""
    chosen = sa.update(attempts).where(attempts.c.key == sa.bindparam("of"))
    return chosen.values({name: sa.bindparam(name) for name in names} | values)


_FILE, _DRAW, _STEP, _SCORE = map(_upsert, (files, draws, steps, evaluations))
_REVIEW, _COMPONENT = map(sa.insert, (reviews, components))
_DRAWN = [draws.c[name] for name in ("domain", "level", "seed", "phase")]
_NEW = ("key", "draw", "member", "tries", "chance")
_ENTER = insert(attempts).from_select(
    [*_NEW, *(column.name for column in _DRAWN)],
    sa.select(*map(sa.bindparam, _NEW), *_DRAWN).where(draws.c.draw == sa.bindparam("draw")),
)
_EMPTIED = ("ended", "outcome", "reward", "place", "verifiers", "first_reward", "verdict_place")
_REENTER = _update("tries", **dict.fromkeys(_EMPTIED), judged=0)
_FINISH = _update(
    "ended", "outcome", "reward", "stop", "tokens", "place", "verifiers", "chars", "sketch",
    first_reward=sa.bindparam("reward"), judged=1,
)  # fmt: skip
_JUDGE = _update("outcome", "reward", "verifiers", "verdict_place", judged=attempts.c.judged + 1)
_TRAIN, _DROP = _update("step"), _update("dropped")
_REWIND = sa.update(attempts).where(attempts.c.step > sa.bindparam("after")).values(step=None)
_FORGET = sa.delete(components).where(components.c.key == sa.bindparam("of"))


class Index:
    """The index of one run folder. `refresh` first, then `rows`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "index.sqlite"
        self._journal = FileJournal(folder / "journal")
        url = sa.URL.create("sqlite", database=str(self._path))
        self._engine = sa.create_engine(url, poolclass=sa.NullPool, connect_args={"timeout": 60})
        sa.event.listen(self._engine, "connect", _set_up)
        sa.event.listen(self._engine, "begin", _begin)

    def rows(self, wanted: sa.Select[Any]) -> list[sa.Row[Any]]:
        """What the index holds."""
        with self._engine.begin() as connection:
            return list(connection.execute(wanted))

    def refresh(self) -> None:
        """Read on: afterwards everything is in that was on the disk when this was called.

        Raises:
            LedgerError: the ledger or the reviews are damaged.
            PreflightError: the index cannot be written.
        """
        try:
            try:
                self._refresh()
            except sa.exc.DatabaseError as error:
                if type(error) is not sa.exc.DatabaseError:
                    raise
                for path in self._folder.glob("index.sqlite*"):  # no database, or a damaged one
                    path.unlink(missing_ok=True)
                self._refresh()
        except sa.exc.OperationalError as error:
            raise PreflightError(
                f"the index {self._path} cannot be written: {error.orig}.",
                "free space or permissions there; it may be deleted at any time.",
            ) from error

    def _refresh(self) -> None:
        with self._engine.execution_options(writes=True).begin() as connection:
            if not self._goes_on(connection):
                old = sa.MetaData()
                old.reflect(connection)
                old.drop_all(connection)
                _METADATA.create_all(connection)
                connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
            read = {row.path: row.read for row in connection.execute(sa.select(files))}
            journal = sorted((self._folder / "journal").glob("*.jsonl"))
            for path in (self._folder / "ledger.jsonl", self._folder / REVIEWS, *journal):
                if path.exists():
                    self._read(connection, path, read.get(self._name(path), 0))

    def _goes_on(self, connection: sa.Connection) -> bool:
        """Whether the schema is this one, and every file begins with what was read of it."""
        if connection.exec_driver_sql("PRAGMA user_version").scalar() != SCHEMA_VERSION:
            return False
        known = connection.execute(sa.select(files))
        return all(_mark(self._folder / row.path, row.read) == row.mark for row in known)

    def _read(self, connection: sa.Connection, path: Path, start: int) -> None:
        """Take in the whole lines of a file from a place on."""
        lines, end = _lines(path, start), start
        effects = self._noted if path.parent.name == "journal" else self._happened
        while batch := list(islice(lines, BATCH)):
            ops = [op for at, line in batch for op in effects(path, at, line)]
            for statement, group in groupby(_gathered(ops), key=lambda op: op[0]):
                connection.execute(statement, [_storable(values) for _, values in group])
            end = batch[-1][0] + len(batch[-1][1])
        done = {"path": self._name(path), "read": end, "mark": _mark(path, end)}
        connection.execute(_FILE, done)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()

    # --- what a line means --------------------------------------------------------------------

    def _happened(self, path: Path, at: int, line: bytes) -> list[_Op]:
        """Effects of a ledger event; kinds that change nothing here have none."""
        try:
            event = json.loads(line)
            return self._effects(event, path.name, at)
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(
                f"The ledger {path} is damaged at byte {at}: {line[:80]!r} is no event.",
                "keep a copy, then cut the file there.",
            ) from error

    def _effects(self, event: dict[str, Any], file: str, at: int) -> list[_Op]:
        match event["kind"]:
            case "drawn":
                return [(_DRAW, {column.name: event[column.name] for column in draws.c})]
            case "entered" if event["tries"] == 1:
                row = {name: event[name] for name in ("key", "draw", "member", "tries")}
                return [(_ENTER, {**row, "chance": seeds.unit("review", event["key"])})]
            case "entered":
                again = {"of": event["key"], "tries": event["tries"]}
                return [_forget(event["key"]), (_REENTER, again)]
            case "finished":
                return self._finished(event, at)
            case "reverified":
                note = self._journal.read(event["place"])
                parts = note.data.get("components", ()) if note else ()
                row = {"of": event["key"], "outcome": event["outcome"], "reward": event["reward"]}
                row |= {"verifiers": event["verifier"], "verdict_place": event["place"]}
                return [(_JUDGE, row), _forget(event["key"]), *_components(event["key"], parts)]
            case "trained":
                return [(_TRAIN, {"of": key, "step": event["step"]}) for key in event["keys"]]
            case "dropped":
                return [(_DROP, {"of": key, "dropped": event["reason"]}) for key in event["keys"]]
            case "rewound":
                return [(_REWIND, {"after": event["step"]})]
            case "controlled" | "labelled" | "claimed" | "declined" | "relabelled":
                row = {name: event.get(name, "") for name in ("kind", "key", "author", "label")}
                return [(_REVIEW, {**row, "file": file, "at": at, "event": json.dumps(event)})]
            case _:
                return []

    def _finished(self, event: dict[str, Any], at: int) -> list[_Op]:
        key = event["key"]
        note = self._journal.read(event["place"]) if event["place"] else None
        body = note.data if note is not None and note.key == key else {}
        parts = (body.get("verdict") or {}).get("components", ())
        text = said(body.get("turns", ()))
        row = {
            **{n: event[n] for n in ("outcome", "reward", "stop", "place")},
            "of": key,
            "ended": at,
            "tokens": event["num_tokens"],
            "verifiers": " ".join(sorted({part.get("verifier", "") for part in parts})),
            "chars": len(text) if body else None,
            "sketch": sketch(text) if event["reward"] else "",
        }
        return [(_FINISH, row), *_components(key, parts)]

    def _noted(self, path: Path, at: int, line: bytes) -> list[_Op]:
        """Effects of a journal record. Trajectories were read with the events that name them."""
        if not line.startswith((b'{"kind": "step"', b'{"kind": "eval"')):
            return []
        try:
            note = decode_note(line.decode("utf-8"))
        except (ValueError, TypeError):
            return []  # a journal may lose records
        data = note.data
        if note.kind == "step":
            metrics = data.get("metrics", {})
            row = {column.name: data.get(column.name) for column in steps.c}
            return [(_STEP, {**row, "loss": metrics.get("loss")})]
        head = {"point": data.get("point"), "weights": data.get("weights")}
        counts = ("n", "passed", "lost")
        return [
            (_SCORE, {**head, "domain": name, **{count: told.get(count) for count in counts}})
            for name, told in data.get("domains", {}).items()
        ]


_ONCE = (_DRAW, _ENTER, _FINISH, _COMPONENT, _TRAIN, _DROP)
"""What befalls an attempt in this order, unless it is made, judged or trained again."""


def _gathered(ops: Iterable[_Op]) -> Iterator[_Op]:
    """The same effects, those of one kind together where that changes nothing: fewer statements."""
    for once, group in groupby(ops, key=lambda op: op[0] in _ONCE):
        run = list(group)
        yield from sorted(run, key=lambda op: _ONCE.index(op[0])) if once else run


def _storable(values: dict[str, Any]) -> dict[str, Any]:
    """Half of a surrogate pair, which a policy may write into an error, is no UTF-8."""
    return {
        name: value.encode("utf-8", "replace").decode()
        if isinstance(value, str) and not value.isascii()
        else value
        for name, value in values.items()
    }


def _set_up(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # `_begin` says when a transaction begins
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def _begin(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _forget(key: str) -> _Op:
    return _FORGET, {"of": key}


def _components(key: str, parts: Iterable[Mapping[str, Any]]) -> list[_Op]:
    names = [column.name for column in components.c if column.name != "key"]
    return [(_COMPONENT, {"key": key, **{n: part.get(n) for n in names}}) for part in parts]


def _lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines from a place on, each with its place."""
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if line.endswith(b"\n"):
                yield start, line
            start += len(line)


def _mark(path: Path, end: int) -> str:
    """Hash of what stands before a place; '' where the file does not reach so far."""
    start = max(0, end - MARK_BYTES)
    try:
        with path.open("rb") as file:
            file.seek(start)
            found = file.read(end - start)
    except OSError:
        return ""
    return hashlib.sha256(found).hexdigest() if len(found) == end - start else ""


def said(turns: Iterable[Mapping[str, Any]]) -> str:
    """Everything a policy said and called, from the turns of a journal record."""
    parts = []
    for turn in turns:
        parts.append(turn.get("text", ""))
        calls = turn.get("tool_calls", ())
        parts += [f"{c['name']} {c.get('raw') or json.dumps(c.get('arguments'))}" for c in calls]
    return "\n".join(parts)


def sketch(text: str) -> str:
    """Four minima of hashed shingles, one in each class of hashes (one-permutation hashing: Li,
    Owen, Zhang 2012): texts that share a part J of their shingles share all four with probability
    about J⁴. '' for texts too short to be telling.

    >>> words = "so the answer that is wanted here must be the largest of all of them"
    >>> sketch(words) == sketch(words.upper()), sketch("42")
    (True, '')
    """
    text = text[:SKETCH_CHARS].casefold()
    words = text.split()
    units, size = (words, 3) if len(words) >= LEAST_WORDS else (list("".join(words)), 8)
    if len(units) < LEAST_WORDS * (1 if units is words else 5):
        return ""
    least: dict[int, int] = {}
    for start in range(len(units) - size + 1):
        value = zlib.crc32(" ".join(units[start : start + size]).encode("utf-8", "replace"))
        if value < least.get(value & 3, 1 << 32):
            least[value & 3] = value
    return "".join(f"{least.get(group, 0):08x}" for group in range(4))
