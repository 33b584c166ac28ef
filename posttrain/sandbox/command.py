"""One command in a sandbox that is live, from its start to its end.

Runs in the holder. The command has no channel into this process but its output pipes; its end is
told by the usher outside its namespaces. The one thing that must stay true: a command that its time
limit or a `kill` ended has left no process, `setsid` children included.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.core.errors import SandboxError
from posttrain.core.ports import ExecResult
from posttrain.sandbox import usher
from posttrain.sandbox.limits import Clip
from posttrain.sandbox.live import Live
from posttrain.sandbox.pipes import Pipe

_KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to run and within which limits."""

    argv: tuple[bytes, ...]
    stdin: bytes
    timeout_s: float
    cap_bytes: int
    """Of each output stream."""
    limits: Mapping[str, int]


class Run:
    """A command that is being run; `kill` may be called at any time."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._stopped = asyncio.Event()
        self._out, self._err = Clip(command.cap_bytes), Clip(command.cap_bytes)

    def kill(self) -> None:
        """End it early."""
        self._stopped.set()

    async def run(self, live: Live) -> ExecResult:
        """Run to the end or the time limit. A command that ends by itself may leave processes in
        the sandbox; one that is ended takes all of the sandbox's processes with it.

        Raises:
            SandboxError: the command could not be started, or would not die.
        """
        began_s = time.monotonic()
        pipes = [Pipe(inward=True), *(Pipe(inward=False) for _ in range(3))]
        stdin, out, err, told = pipes
        try:
            live.order(self._command.argv, self._command.limits, [pipe.inner for pipe in pipes])
            for pipe in pipes:
                pipe.close_inner()
            feeding = asyncio.ensure_future(stdin.feed(self._command.stdin))
            out.drain(self._out.feed)
            err.drain(self._err.feed)
            end = None
            try:
                end = await self._end(told)
            finally:
                feeding.cancel()
                if not end:
                    problem = live.broken
                    await live.end()
            if end == b"" and problem:
                raise SandboxError(f"a command could not be started: {problem}")
            out.drain_rest(self._out.feed)
            err.drain_rest(self._err.feed)
            return self._result(end, time.monotonic() - began_s)
        finally:
            for pipe in pipes:
                pipe.close()

    async def _end(self, told: Pipe) -> bytes | None:
        """What the usher tells, empty if it was ended with the sandbox's processes; None where
        time ran out or `kill` came first.
        """
        word = asyncio.ensure_future(told.word())
        stop = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait(
                (word, stop), timeout=self._command.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            return word.result() if word.done() else None
        finally:
            word.cancel()
            stop.cancel()

    def _result(self, end: bytes | None, duration_s: float) -> ExecResult:
        """A command that ended the sandbox's processes, and itself with them, was killed by it."""
        exit_code = None
        if end is not None:
            told = usher.exit_code(end)
            exit_code = _KILLED if told is None else told
        return ExecResult(
            exit_code=exit_code,
            stdout=self._out.text(),
            stderr=self._err.text(),
            timed_out=end is None and not self._stopped.is_set(),
            truncated=self._out.truncated or self._err.truncated,
            duration_s=duration_s,
        )
