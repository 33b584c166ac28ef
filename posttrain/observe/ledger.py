"""The durable account of a run: an append-only file of `core.events`, one JSON object a line.

It keeps events and knows nothing about what they mean (`schedule.account` folds them). One process
writes it, under a lock that ends with the process. The one thing that must stay true: after
`sync` returned, every event appended before it survives a power cut, and a line that was cut by a
crash is never mistaken for an event.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from posttrain.core.errors import LedgerError
from posttrain.core.events import LedgerEvent, decode, encode

NEXT_STEP = "free space or permissions there, then `posttrain train --resume` the run folder."


class FileLedger:
    """A ledger open for writing. Opening it truncates a torn last line (see `torn`).

    Raises:
        LedgerError: the file cannot be opened or written, or another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_descriptor = -1
        self.torn = ""
        """The start of a last line without its newline that was cut off at opening, or ''."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file_descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            fcntl.flock(self._file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._offset = self._truncate_torn_line()
            _sync_directory(path.parent)
        except BlockingIOError as error:
            self.close()
            raise LedgerError(
                f"Another process is writing {path}; a run has one writer.",
                "wait for it to end, or stop it, or choose another run name.",
            ) from error
        except OSError as error:
            self.close()
            raise LedgerError(
                f"Cannot open the ledger {path}: {error.strerror}.", NEXT_STEP
            ) from error

    @property
    def offset(self) -> int:
        """Bytes written so far: the place at which the next event will begin."""
        return self._offset

    def append(self, event: LedgerEvent) -> None:
        """Write one event to the operating system (`sync` puts it on the disk).

        Raises:
            LedgerError: it could not be written; the file then ends with the event before it.
        """
        line = encode(event).encode("utf-8") + b"\n"
        try:
            written = os.write(self._file_descriptor, line)
            if written != len(line):
                self._undo()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise LedgerError(
                f"Cannot write the ledger {self._path}: {error.strerror}. "
                f"Everything before this {event.kind!r} event is kept.",
                NEXT_STEP,
            ) from error
        self._offset += written

    def sync(self) -> None:
        """Put everything appended on the disk.

        Raises:
            LedgerError: the disk refused.
        """
        try:
            os.fsync(self._file_descriptor)
        except OSError as error:
            raise LedgerError(
                f"Cannot sync the ledger {self._path}: {error.strerror}.", NEXT_STEP
            ) from error

    def events(self) -> Iterator[LedgerEvent]:
        """All events, oldest first."""
        return read_events(self._path)

    def close(self) -> None:
        """Give up the lock; idempotent."""
        if self._file_descriptor >= 0:
            os.close(self._file_descriptor)
            self._file_descriptor = -1

    def __enter__(self) -> FileLedger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _undo(self) -> None:
        """Cut a half-written line off; where even that fails, nothing may be appended to it."""
        try:
            os.ftruncate(self._file_descriptor, self._offset)
        except OSError:
            self.close()
            raise

    def _truncate_torn_line(self) -> int:
        size = os.fstat(self._file_descriptor).st_size
        end, chunk = size, 1 << 16
        while end > 0:
            start = max(0, end - chunk)
            newline = os.pread(self._file_descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            self.torn = os.pread(self._file_descriptor, 200, end).decode("utf-8", "replace")
            os.ftruncate(self._file_descriptor, end)
        return end


def read_events(path: Path, *, offset: int = 0) -> Iterator[LedgerEvent]:
    """The events of a ledger from a byte offset on, without a lock, oldest first.

    A last line without newline is not yet an event and is left out.

    Raises:
        LedgerError: the file cannot be read, or a whole line is no event.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if line.endswith(b"\n"):
                    yield _decoded(line, path, offset)
                offset += len(line)
    except OSError as error:
        if isinstance(error, LedgerError):
            raise
        raise LedgerError(
            f"Cannot read the ledger {path}: {error.strerror}.",
            "check that the run folder is whole and readable.",
        ) from error


def _decoded(line: bytes, path: Path, offset: int) -> LedgerEvent:
    try:
        return decode(line.decode("utf-8"))
    except (LedgerError, UnicodeDecodeError) as error:
        raise LedgerError(
            f"The ledger {path} is damaged at byte {offset}: {line[:80]!r} is no event.",
            f"keep a copy, then cut the file there (`truncate -s {offset}`) and resume; what the "
            "cut part accounted for is made again.",
        ) from error


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
