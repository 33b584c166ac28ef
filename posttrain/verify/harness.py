"""Runs inside a fresh sandbox: carries out one checker and reports once, on a channel of its own.

Standard library only; it imports nothing of posttrain and is copied into the sandbox as text. Its
order (nonce, checker source, parameters, reply) comes by standard input, so that no file, argument
or environment variable holds it. Before anything else runs it makes itself unreadable to other
processes and moves its output to a descriptor that children do not inherit. The one thing that
must stay true: what the attempt left runs only in child processes, which can neither read the
order nor write the record.

While a candidate runs, the last line on standard error is the nonce and `+`, afterwards the nonce
and `-`: a harness that ends on `+` was ended by what it ran. One run sees what an earlier one left
in the writable folders, so a checker runs its own programs before the candidate's, or not at all.

A checker is Python source that defines `check(order)`; `order` has `artefacts` (path), `reply`,
`params`, and `run(argv, stdin=b"", timeout_s=…) -> Ran`. It returns a number in [0, 1], a bool, or
a mapping with `value` and, for suites, `expected`, `ran`, `passed`, and optionally `evidence`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

MAX_OUTPUT_BYTES = 1 << 20
_SET_DUMPABLE, _SET_CHILD_SUBREAPER = 4, 36
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_WALL_FACTOR = 4
"""Wall limit over CPU limit: a busy machine must not turn a right program into a wrong one."""


@dataclass(frozen=True)
class Ran:
    """What a candidate process did."""

    exit_code: int
    """Negative: the number of the signal that ended it; 127: not there; 126: not a program."""
    stdout: bytes
    timed_out: bool


@dataclass(frozen=True)
class Order:
    """What a checker is given."""

    artefacts: str
    reply: str
    params: Mapping[str, Any]
    run: Callable[..., Ran]


def run(argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 2.0) -> Ran:
    """Run a candidate to its end: `timeout_s` of CPU time, four times that of wall time.

    Its output is cut at 1 MiB. Every process it started is dead when this returns.
    """

    def limits() -> None:
        cpu = max(1, math.ceil(timeout_s))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    with _unnamed() as given, _unnamed() as said, _modes_kept():
        given.write(stdin)
        given.seek(0)
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=given,
                stdout=said,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=limits,
            )
        except OSError as error:
            missing = error.errno == errno.ENOENT
            return Ran(_NOT_FOUND if missing else _NOT_EXECUTABLE, b"", False)
        try:
            process.wait(timeout=timeout_s * _WALL_FACTOR)
            timed_out = process.returncode == -signal.SIGXCPU
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end(process)
        said.seek(0)
        return Ran(process.returncode, said.read(MAX_OUTPUT_BYTES), timed_out)


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


def _announced(progress: int, nonce: str) -> Callable[..., Ran]:
    """`run` that says on `progress` when a candidate runs."""

    def announced(argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 2.0) -> Ran:
        os.write(progress, f"{nonce} +\n".encode())
        ran = run(argv, stdin=stdin, timeout_s=timeout_s)
        os.write(progress, f"{nonce} -\n".encode())
        return ran

    return announced


def _carry_out(order: Mapping[str, Any], progress: int) -> dict[str, Any]:
    """The record of one order; an exception of the checker is its own failure."""
    try:
        if "command" in order:
            ended = run(order["command"], timeout_s=float(order["timeout_s"]))
            if ended.timed_out or ended.exit_code not in (0, 1):
                return {"error": f"command ended with {ended.exit_code}, wanted 0 or 1"}
            return {"value": 1.0 - ended.exit_code}
        space: dict[str, Any] = {"__name__": "checker"}
        exec(compile(order["source"], "checker", "exec"), space)
        given = Order(order["artefacts"], order["reply"], order["params"],
                      _announced(progress, order["nonce"]))  # fmt: skip
        result = space["check"](given)
        return dict(result) if isinstance(result, Mapping) else {"value": float(result)}
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1].lineno
        return {"error": f"{type(error).__name__} in line {where}: {error}"}


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
