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
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from posttrain.core.errors import UsageError, WorkerError
from posttrain.core.task import Json
from posttrain.sandbox import child, wire

_LOAD_S = 120.0
"""For starting the process and importing the function's module; not part of a call's time."""
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
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
        head = {"id": 0, "function": function, "arguments": list(arguments)}
        try:
            data = wire.encode(head)
        except (TypeError, ValueError) as error:
            raise UsageError(f"arguments of {function} are no JSON values: {error}.") from error
        call = _Call(function, data, timeout_s)
        try:
            answer = self._threads.submit(self._carry_out, call)
        except RuntimeError as error:
            raise WorkerError("the workers are closed.") from error
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            call.cancel()
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
            process.collect()

    async def __aenter__(self) -> ProcessWorkers:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class _Call:
    """One call, which may be cancelled while a process works on it."""

    def __init__(self, function: str, data: bytes, timeout_s: float) -> None:
        self.function = function
        self.data = data
        self.timeout_s = timeout_s
        self.timed_out = False
        self._lock = threading.Lock()
        self._cancelled = False
        self._process: _Process | None = None

    def cancel(self) -> None:
        """Kill the process that works on it, now or as soon as one would."""
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                self._process.kill()

    @contextlib.contextmanager
    def on(self, process: _Process) -> Iterator[None]:
        """While `process` works on it."""
        with self._lock:
            if self._cancelled:
                raise WorkerError(f"{self.function} was cancelled.")
            self._process = process
        try:
            yield
        finally:
            with self._lock:
                self._process = None


class _Process:
    """One worker process; used by one thread at a time, killed from any."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._line: socket.socket | None = None
        self._closed = False
        self.started = 0

    def call(self, call: _Call) -> Json:
        """Send a call and wait for its answer.

        Raises:
            WorkerError: see `ProcessWorkers.call`.
        """
        stage = f"{_LOAD_S:g} s for importing its module"
        with call.on(self):
            try:
                line = self._ensure()
                decoder = wire.Decoder()
                line.settimeout(_LOAD_S)
                line.sendall(call.data)
                loaded = self._next(line, decoder, time.monotonic() + _LOAD_S)
                if "error" in loaded.head:
                    raise WorkerError(f"{call.function} {loaded.head['error']}")
                stage = f"{call.timeout_s:g} s"
                answer = self._next(line, decoder, time.monotonic() + call.timeout_s)
            except TimeoutError as error:
                self.kill()
                self.collect()
                call.timed_out = True
                raise WorkerError(f"{call.function} ran past its time limit ({stage}).") from error
            except (OSError, wire.FrameError) as error:
                self.kill()
                code = self.collect()
                raise WorkerError(
                    f"the worker of {call.function} died (exit code {code}, {error})."
                ) from error
        if "error" in answer.head:
            raise WorkerError(f"{call.function} {answer.head['error']}")
        if "result" not in answer.head:
            raise WorkerError(f"{call.function} gave no answer but {dict(answer.head)!r:.200}.")
        return answer.head["result"]

    def _next(self, line: socket.socket, decoder: wire.Decoder, until_s: float) -> wire.Frame:
        """The next frame."""
        for frame in decoder.feed(b""):
            return frame
        while True:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            line.settimeout(left_s)
            data = line.recv(1 << 16)
            if not data:
                raise OSError("it closed the line")
            for frame in decoder.feed(data):
                return frame

    def _ensure(self) -> socket.socket:
        """The line to a living process."""
        with self._lock:
            if self._closed:
                raise WorkerError("the workers are closed.")
            if self._line is not None:
                return self._line
            ours, theirs = socket.socketpair()
            variables = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
            with theirs:
                self._pid = child.spawn(
                    "posttrain.sandbox.worker_main",
                    theirs.fileno(),
                    options=("-B",),
                    search=tuple(path or os.getcwd() for path in sys.path),
                    variables={**variables, **_FIXED},
                )
            self._line = ours
            self.started += 1
        order = {"memory_bytes": self._memory_bytes, "parent": os.getpid()}
        ours.settimeout(_LOAD_S)
        ours.sendall(wire.encode(order))
        return ours

    def kill(self) -> None:
        """End the process and what it started."""
        with self._lock:
            if self._pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)

    def collect(self) -> int | None:
        """Reap it once it was killed or died: its exit code. The next call starts another."""
        with self._lock:
            code = None
            if self._pid is not None:
                code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
                self._pid = None
            if self._line is not None:
                self._line.close()
                self._line = None
            return code

    def close(self) -> None:
        """Kill it for good; a call under way fails."""
        with self._lock:
            self._closed = True
        self.kill()
