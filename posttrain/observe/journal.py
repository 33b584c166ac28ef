"""The record of everything the ledger does not need: append-only segments of JSON lines.

Every line parses with a strict JSON parser: a number that is not finite is written as
`{"$float": "nan" | "inf" | "-inf"}`, so its kind is kept. The one thing that must stay true:
whatever the disk does, a write never raises and never stops the run; what was lost is counted.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.core import codec
from posttrain.core.errors import UsageError
from posttrain.core.events import Note

SEGMENT_BYTES = 64 << 20
"""A segment is closed once it is this long."""

NON_FINITE = "$float"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStats:
    """What a journal did since it was opened."""

    written: int
    lost: int
    last_error: str
    """Why the last lost record was lost, or ''."""


class FileJournal:
    """Segments `000001.jsonl`, `000002.jsonl`, … in one folder. Each opening starts a new one."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._file_descriptor = -1
        self._segment = 0
        self._offset = 0
        self._written = 0
        self._lost = 0
        self._last_error = ""

    def write(self, note: Note) -> str:
        """Append a record; its place `segment:offset:length`, or '' where it was lost."""
        stamped = note if note.wall_s else replace(note, wall_s=time.time())
        try:
            line = encode_note(stamped).encode("utf-8") + b"\n"
            return self._append(line)
        except (OSError, UsageError) as error:
            self._lost += 1
            self._last_error = str(error)
            return ""

    def read(self, place: str) -> Note | None:
        """The record at a place, or None where it cannot be read back whole."""
        try:
            segment, offset, length = (int(part) for part in place.split(":"))
            with (self._directory / _segment_name(segment)).open("rb") as file:
                file.seek(offset)
                line = file.read(length)
            return _whole_note(line) if len(line) == length else None
        except (OSError, ValueError):
            return None

    def sync(self) -> None:
        """Push what was written to the disk, as far as that is possible."""
        if self._file_descriptor < 0:
            return
        try:
            os.fsync(self._file_descriptor)
        except OSError as error:
            self._last_error = str(error)

    def close(self) -> None:
        """Close the segment; idempotent."""
        if self._file_descriptor >= 0:
            os.close(self._file_descriptor)
            self._file_descriptor = -1

    def stats(self) -> JournalStats:
        """Counts since the journal was opened."""
        return JournalStats(written=self._written, lost=self._lost, last_error=self._last_error)

    def _append(self, line: bytes) -> str:
        if self._file_descriptor < 0 or self._offset >= self._segment_bytes:
            self._open_segment()
        written = os.write(self._file_descriptor, line)
        if written != len(line):
            self._undo()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        place = f"{self._segment}:{self._offset}:{len(line)}"
        self._offset += len(line)
        self._written += 1
        return place

    def _undo(self) -> None:
        """Cut a half-written record off; where even that fails, the next one opens a segment."""
        try:
            os.ftruncate(self._file_descriptor, self._offset)
        except OSError:
            self.close()
            raise

    def _open_segment(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        number = max(_segments(self._directory), default=0) + 1
        descriptor = os.open(
            self._directory / _segment_name(number),
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND,
            0o644,
        )
        self.close()
        self._file_descriptor, self._segment, self._offset = descriptor, number, 0


def read_notes(directory: Path, *, kind: str | None = None) -> Iterator[Note]:
    """All records of a journal folder, oldest first, or those of one kind.

    Lines that are cut or damaged are left out: a journal may lose records.
    """
    for number in sorted(_segments(directory)):
        with (directory / _segment_name(number)).open("rb") as file:
            for line in file:
                note = _whole_note(line)
                if note is not None and kind in (None, note.kind):
                    yield note


def encode_note(note: Note) -> str:
    """One line of strict JSON without the newline.

    Raises:
        UsageError: `data` holds something that is no JSON value.

    >>> encode_note(Note(kind="step", data={"loss": float("nan")}, wall_s=1.0))
    '{"kind": "step", "key": "", "data": {"loss": {"$float": "nan"}}, "wall_s": 1.0}'
    """
    try:
        fields = codec.to_json(note)
        try:
            return json.dumps(fields, allow_nan=False)
        except ValueError:
            return json.dumps(_guarded(fields), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a {note.kind!r} record is no JSON value: {error}.") from error


def decode_note(line: str) -> Note:
    """The record of one line.

    Raises:
        ValueError, TypeError: the line is no record.
    """
    return codec.from_json(Note, json.loads(line, object_hook=_unguarded))


def _whole_note(line: bytes) -> Note | None:
    try:
        return decode_note(line.decode("utf-8")) if line.endswith(b"\n") else None
    except (ValueError, TypeError):
        return None


def _guarded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {NON_FINITE: str(value)}
    if isinstance(value, dict):
        return {key: _guarded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_guarded(item) for item in value]
    return value


def _unguarded(fields: dict[str, Any]) -> Any:
    if len(fields) == 1 and fields.get(NON_FINITE) in ("nan", "inf", "-inf"):
        return float(fields[NON_FINITE])
    return fields


def _segment_name(number: int) -> str:
    return f"{number:06d}.jsonl"


def _segments(directory: Path) -> list[int]:
    return [int(path.stem) for path in directory.glob("*.jsonl") if path.stem.isdigit()]
