"""Runs inside a fresh sandbox: carries out one checker and reports once, on a channel of its own.

Standard library only; it imports nothing of posttrain and is copied into the sandbox as text. Its
order (nonce, checker source, parameters, reply) comes by standard input, so that no file, argument
or environment variable holds it. Before anything else runs it makes itself unreadable to other
processes and moves its output to a descriptor that children do not inherit. The one thing that
must stay true: what the attempt left runs only in child processes, which can neither read the
order nor write the record.

While a candidate runs, the last line on standard error is the nonce and `+`, afterwards the nonce
and `-`: a harness that ends on `+` was ended by what it ran. Each run begins in a new folder, also
its home, that holds the check's files and nothing else. Elsewhere (/tmp) a run finds what earlier
ones left: the place to hand a compiled program on, and no place for anything a verdict rests on.

A checker is Python source that defines `check(order)`; `order` is an `Order`. It returns a number
in [0, 1], a bool, or a mapping with `value` and, for suites, `expected`, `ran`, `passed`, and
optionally `evidence`. An exception is its own failure and pays nothing, so it opens no file that
an attempt or a run left: `order.artefacts` and `Ran.folder` read them whatever they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

MAX_FILE_BYTES = 8 << 20
"""A larger file is read as none."""
MAX_OUTPUT_BYTES = 1 << 20
MAX_RECORD_CHARS = 60_000
"""Evidence that would make the record longer is left out of it."""
_SET_DUMPABLE, _SET_CHILD_SUBREAPER = 4, 36
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_WALL_FACTOR = 4
"""Wall limit over CPU limit: a busy machine must not turn a right program into a wrong one."""


class Folder(str):
    """Path of a folder that an attempt or a candidate filled. Its methods never raise, block or
    lead outside, whatever lies there; nothing may be writing to it.
    """

    def read_bytes(self, path: str) -> bytes | None:
        """Bytes of a regular file, by its path in the folder. None: there is nothing, or a folder,
        a pipe, a link (in any component), something unreadable, or more than 8 MiB.
        """
        with contextlib.suppress(OSError, ValueError):
            place, status = str(self), os.lstat(self)
            for part in path.split("/"):
                place = os.path.join(place, part)
                status = os.lstat(place)
                if part in ("", "..") or stat.S_ISLNK(status.st_mode):
                    return None
            if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_FILE_BYTES:
                with open(place, "rb") as file:
                    return file.read()
        return None

    def read_text(self, path: str) -> str | None:
        """As `read_bytes`; None also where the bytes are no UTF-8."""
        data = self.read_bytes(path)
        try:
            return None if data is None else data.decode()
        except UnicodeDecodeError:
            return None


@dataclass(frozen=True)
class Ran:
    """What a candidate process did."""

    exit_code: int
    """Negative: the number of the signal that ended it; 127: not there; 126: not a program, or
    earlier runs left no room for the check's files."""
    stdout: bytes
    timed_out: bool
    folder: Folder
    """Where it began; removed when the next run begins."""


@dataclass(frozen=True)
class Order:
    """What a checker is given."""

    artefacts: Folder
    """What the attempt left."""
    reply: str
    params: Mapping[str, Any]
    files: Mapping[str, str]
    """The check's files: path → text, as every run finds them."""
    run: Callable[..., Ran]
    """`run(argv, stdin=b"", timeout_s=2.0) -> Ran`."""


def run(
    argv: Sequence[str],
    files: Mapping[str, str],
    *,
    stdin: bytes = b"",
    timeout_s: float = 2.0,
) -> Ran:
    """Run a candidate to its end, in a new folder with these files: `timeout_s` of CPU time, four
    times that of wall time.

    Its output is cut at 1 MiB. Every process it started is dead when this returns.
    """
    folder = Folder(os.path.join(os.getcwd(), os.urandom(8).hex()))

    def limits() -> None:
        cpu = max(1, math.ceil(timeout_s))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    with _unnamed() as given, _unnamed() as said, _modes_kept():
        given.write(stdin)
        given.seek(0)
        try:
            _lay(folder, files)
            process = subprocess.Popen(
                list(argv),
                cwd=folder,
                env={**os.environ, "HOME": folder},
                stdin=given,
                stdout=said,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=limits,
            )
        except OSError as error:
            missing = error.errno == errno.ENOENT
            return Ran(_NOT_FOUND if missing else _NOT_EXECUTABLE, b"", False, folder)
        try:
            process.wait(timeout=timeout_s * _WALL_FACTOR)
            timed_out = process.returncode == -signal.SIGXCPU
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end(process)
        said.seek(0)
        return Ran(process.returncode, said.read(MAX_OUTPUT_BYTES), timed_out, folder)


def _lay(folder: Folder, files: Mapping[str, str]) -> None:
    os.mkdir(folder)
    for path, text in files.items():
        place = os.path.join(folder, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w", encoding="utf-8") as file:
            file.write(text)


def _unnamed() -> BinaryIO:
    """A file in memory: a candidate that fills the disk cannot be in its way."""
    return open(os.memfd_create("ran"), "w+b")


@contextlib.contextmanager
def _modes_kept() -> Iterator[None]:
    """Give the folders a checker works in the modes back that a candidate may have taken."""
    modes = {folder: stat.S_IMODE(os.stat(folder).st_mode)
             for folder in (os.getcwd(), tempfile.gettempdir())}  # fmt: skip
    try:
        yield
    finally:
        for folder, mode in modes.items():
            if stat.S_IMODE(os.stat(folder).st_mode) != mode:
                os.chmod(folder, mode)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and everything it left, orphans included (they become our children)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                parent = stat.read().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(name))
    return found


def _candidates(files: Mapping[str, str], progress: int, nonce: str) -> Callable[..., Ran]:
    """`Order.run`: says on `progress` when a candidate runs, and removes the folder of the last."""
    last: list[Folder] = []

    def candidate(argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 2.0) -> Ran:
        while last:
            with contextlib.suppress(RecursionError):
                shutil.rmtree(last.pop(), ignore_errors=True)
        os.write(progress, f"{nonce} +\n".encode())
        ran = run(argv, files, stdin=stdin, timeout_s=timeout_s)
        os.write(progress, f"{nonce} -\n".encode())
        last.append(ran.folder)
        return ran

    return candidate


def _carry_out(order: Mapping[str, Any], progress: int) -> dict[str, Any]:
    """The record of one order; an exception of the checker is its own failure."""
    try:
        if "command" in order:
            ended = run(order["command"], order["files"], timeout_s=float(order["timeout_s"]))
            if ended.timed_out or not 0 <= ended.exit_code < _NOT_EXECUTABLE:
                return {"error": f"failed: command ended with {ended.exit_code}, wanted 0 to 125"}
            return {"value": float(ended.exit_code == 0)}
        space: dict[str, Any] = {"__name__": "checker"}
        exec(compile(order["source"], "checker", "exec"), space)
        given = Order(Folder(order["artefacts"]), order["reply"], order["params"], order["files"],
                      _candidates(order["files"], progress, order["nonce"]))  # fmt: skip
        if not callable(space.get("check")):
            return {"error": "defines no check(order)"}
        result = space["check"](given)
        record = dict(result) if isinstance(result, Mapping) else {"value": float(result)}
        if len(json.dumps(record)) > MAX_RECORD_CHARS:
            record["evidence"] = {"left out": f"it made a record of over {MAX_RECORD_CHARS}"}
        return record
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1].lineno
        return {"error": f"failed: {type(error).__name__} in line {where}: {error}"}


def main() -> int:
    """Read the order, carry it out, write one record; 0 where that was possible."""
    libc = ctypes.CDLL(None)
    hidden = libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    adopted = libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if hidden != 0 or adopted != 0:
        return 3
    order = json.loads(sys.stdin.buffer.read())
    channel, progress = os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    record = {"nonce": order["nonce"], **_carry_out(order, progress)}
    with open(channel, "w", encoding="utf-8") as report:
        report.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
