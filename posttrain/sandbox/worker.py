"""Killable Python processes for our own code on unreliable input: generators, scorers, mathematics.

Not a sandbox: what runs here is ours, only its running time, memory and crashes are not trusted. A
time limit is kept by killing the process (never by a signal handler or a thread, which endless code
ignores), so it holds from any thread and any event loop. The one thing that must stay true: a call
returns a JSON value that the function returned, or raises `WorkerError`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.core.errors import UsageError, WorkerError
from posttrain.core.task import Json
from posttrain.sandbox import wire
from posttrain.sandbox.channel import spawn

_LOAD_S = 120.0
"""For starting the process and importing the function's module; not part of a call's time."""
_PASSED_ON = {"PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"}
_FIXED: Mapping[str, str] = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """Numbers of calls since the start."""

    calls: int
    failed: int
    """Calls that raised `WorkerError`, those killed at their time limit included."""
    timed_out: int
    started: int
    """Processes started; more than there are at once means that some were killed or died."""


class ProcessWorkers:
    """A few worker processes and a queue before them (`containment.Workers`). Close it, or use it
    as a context manager; processes start with the first calls.
    """

    def __init__(self, *, processes: int = 1, memory_bytes: int = 4 << 30) -> None:
        if processes < 1:
            raise UsageError(f"wanted at least one worker process, got {processes}.")
        self._processes = [_Process(memory_bytes) for _ in range(processes)]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = concurrent.futures.ThreadPoolExecutor(processes, "worker")
        self._lock = threading.Lock()
        self._calls = self._failed = self._timed_out = 0

    async def call(self, function: str, *arguments: Json, timeout_s: float) -> Json:
        """As the port says. Waiting for a free process does not count against the time limit;
        cancelling the caller kills the process.

        Raises:
            UsageError: the name has no `module:name` form, or an argument is no JSON value.
            WorkerError: it raised, died, ran out of time or answered with no JSON value.
        """
        if function.count(":") != 1 or timeout_s <= 0:
            raise UsageError(f"wanted 'module:name' and a time, got {function!r}, {timeout_s} s.")
        try:
            data = json.dumps(arguments, allow_nan=False).encode("ascii")
        except (TypeError, ValueError) as error:
            raise UsageError(f"arguments of {function} are no JSON values: {error}.") from error
        if len(data) > wire.MAX_BODY_BYTES:
            raise UsageError(f"arguments of {function} have {len(data)} bytes, which are too many.")
        call = _Call(function, data, timeout_s)
        try:
            answer = self._threads.submit(self._carry_out, call)
        except RuntimeError as error:
            raise WorkerError("the workers are closed.") from error
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            call.cancelled = True
            for process in self._processes:
                process.drop(call)
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise WorkerError("the workers were closed.") from None
            raise

    def _carry_out(self, call: _Call) -> Json:
        process = self._idle.get()
        try:
            result = process.call(call)
        except WorkerError:
            with self._lock:
                self._failed += 1
                self._timed_out += call.timed_out
            raise
        finally:
            with self._lock:
                self._calls += 1
            self._idle.put(process)
        return result

    def stats(self) -> WorkerStats:
        """Numbers now."""
        return WorkerStats(
            calls=self._calls,
            failed=self._failed,
            timed_out=self._timed_out,
            started=sum(process.started for process in self._processes),
        )

    def check(self) -> None:
        """Invariants."""
        assert self._timed_out <= self._failed <= self._calls, self.stats()

    async def close(self) -> None:
        """Kill every process; calls under way fail. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()
        await asyncio.shield(asyncio.to_thread(self._collect))

    def _collect(self) -> None:
        self._threads.shutdown()
        for process in self._processes:
            process.end()

    async def __aenter__(self) -> ProcessWorkers:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


@dataclass(slots=True, eq=False)
class _Call:
    """One call."""

    function: str
    arguments: bytes
    timeout_s: float
    timed_out: bool = False
    cancelled: bool = False


class _Process:
    """One worker process after another, made and ended by the one thread that uses it; others hang
    up on it, which that thread takes for its end.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._call: _Call | None = None
        """What it works on."""
        self._pid = 0
        self._decoder = wire.Decoder()
        self._loaded = set[str]()
        self._closed = False
        self.started = 0

    def call(self, call: _Call) -> Json:
        """Send a call and wait for its answer."""
        stage, order = f"{_LOAD_S:g} s for importing its module", {"function": call.function}
        head: Mapping[str, Any] = {}
        try:
            with self._on(call) as line:
                if call.function not in self._loaded:
                    head = self._answer(line, wire.encode(order), within_s=_LOAD_S)
                if "error" not in head:
                    self._loaded.add(call.function)
                    stage, data = f"{call.timeout_s:g} s", wire.encode(order, call.arguments)
                    head = self._answer(line, data, within_s=call.timeout_s)
        except TimeoutError as error:
            self.end()
            call.timed_out = True
            raise WorkerError(f"{call.function} ran past its time limit ({stage}).") from error
        except (OSError, wire.FrameError) as error:
            told = f"exit code {self.end()}, {error}"
            raise WorkerError(f"the worker of {call.function} died ({told}).") from error
        if "error" in head:
            raise WorkerError(f"{call.function} {head['error']}")
        if "result" not in head:
            raise WorkerError(f"{call.function} gave no answer but {dict(head)!r:.200}.")
        return head["result"]

    @contextlib.contextmanager
    def _on(self, call: _Call) -> Iterator[socket.socket]:
        """The line to a living process, while it works on a call."""
        line = self._ensure()
        with self._lock:
            if call.cancelled:
                raise WorkerError(f"{call.function} was cancelled.")
            self._call = call
        try:
            yield line
        finally:
            with self._lock:
                self._call = None
            if call.cancelled:
                raise OSError("it was cancelled")

    def drop(self, call: _Call) -> None:
        """Hang up if it works on this call, which is cancelled."""
        with self._lock:
            if self._call is call and self._line is not None:
                _hang_up(self._line)

    def _answer(self, line: socket.socket, data: bytes, *, within_s: float) -> Mapping[str, Any]:
        """What the process answers to a frame."""
        until_s = time.monotonic() + within_s
        line.settimeout(within_s)
        line.sendall(data)
        while (left_s := until_s - time.monotonic()) > 0:
            line.settimeout(left_s)
            if not (received := line.recv(1 << 16)):
                raise OSError("it closed the line")
            for frame in self._decoder.feed(received):
                return frame.head
        raise TimeoutError

    def _ensure(self) -> socket.socket:
        """The line to a living process."""
        with self._lock:
            if self._closed:
                raise WorkerError("the workers are closed.")
            if self._line is not None:
                return self._line
            line, theirs = socket.socketpair()
            with theirs:
                self._pid = spawn(
                    "posttrain.sandbox.worker_main",
                    theirs.fileno(),
                    options=("-B", "-P"),
                    search=tuple(path or os.getcwd() for path in sys.path),
                    variables={**_FIXED, **_passed_on()},
                )
            self._line, self._decoder = line, wire.Decoder()
            self._loaded.clear()
            self.started += 1
        order = {"memory_bytes": self._memory_bytes, "parent": os.getpid()}
        line.sendall(wire.encode(order))
        return line

    def end(self) -> int | None:
        """Kill the process and what it started: its exit code. The next call starts another."""
        with self._lock:
            line, self._line = self._line, None
        if line is None:
            return None
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)
        line.close()
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def close(self) -> None:
        """Hang up for good; a call under way fails."""
        with self._lock:
            self._closed = True
            if self._line is not None:
                _hang_up(self._line)


def _hang_up(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)


def _passed_on() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED_ON & os.environ.keys()}
