"""Runs inside a fresh sandbox: carries out one checker and reports once, on a channel of its own.

Standard library only; it imports nothing of posttrain and is copied into the sandbox as text. Its
order (nonce, checker source, parameters, reply) comes by standard input, so that no file, argument
or environment variable holds it. Before anything else runs it makes itself unreadable to other
processes and moves its output to a descriptor that children do not inherit. The one thing that
must stay true: what the attempt left runs only in child processes, which can neither read the
order nor write the record.

A checker is Python source that defines `check(order)`; `order` has `artefacts` (path), `reply`,
`params`, and `run(argv, stdin=b"", timeout_s=…) -> Ran`. It returns a number in [0, 1], a bool, or
a mapping with `value` and, for suites, `expected`, `ran`, `passed`, and optionally `evidence`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_OUTPUT_BYTES = 1 << 20
_SET_DUMPABLE, _SET_CHILD_SUBREAPER = 4, 36
_WALL_FACTOR = 4
"""Wall limit over CPU limit: a busy machine must not turn a right program into a wrong one."""


@dataclass(frozen=True)
class Ran:
    """What a candidate process did."""

    exit_code: int
    """Negative: the number of the signal that ended it."""
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

    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(stdin)
        given.seek(0)
        process = subprocess.Popen(
            list(argv),
            stdin=given,
            stdout=said,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=limits,
        )
        try:
            process.wait(timeout=timeout_s * _WALL_FACTOR)
            timed_out = process.returncode == -signal.SIGXCPU
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end(process)
        said.seek(0)
        return Ran(process.returncode, said.read(MAX_OUTPUT_BYTES), timed_out)


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


def _carry_out(order: Mapping[str, Any]) -> dict[str, Any]:
    """The record of one order; an exception of the checker is its own failure."""
    try:
        if "command" in order:
            ended = run(order["command"], timeout_s=float(order["timeout_s"]))
            if ended.timed_out or ended.exit_code not in (0, 1):
                return {"error": f"command ended with {ended.exit_code}, wanted 0 or 1"}
            return {"value": 1.0 - ended.exit_code}
        space: dict[str, Any] = {"__name__": "checker"}
        exec(compile(order["source"], "checker", "exec"), space)
        given = Order(order["artefacts"], order["reply"], order["params"], run)
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
    channel = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    record = {"nonce": order["nonce"], **_carry_out(order)}
    with open(channel, "w", encoding="utf-8") as report:
        report.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
