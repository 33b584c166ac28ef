"""One command in a sandbox that is live, from its start to its end.

Runs in the holder. The command has no channel into this process but its output pipes; its end is
told by the usher outside its namespaces. The one thing that must stay true: a command that its time
limit or a `kill` ended has left no process, `setsid` children included.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.core.errors import SandboxError
from posttrain.core.ports import ExecResult
from posttrain.sandbox import enter
from posttrain.sandbox.limits import Clip
from posttrain.sandbox.live import Live
from posttrain.sandbox.pipes import Pipe


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

    async def run(
        self, live: Live, *, seccomp: bytes | None, groups: tuple[str, ...]
    ) -> ExecResult:
        """Run to the end or the time limit. A command that ends by itself may leave processes in
        the sandbox; one that is ended takes all of the sandbox's processes with it.

        Raises:
            SandboxError: the command could not be started, or would not die.
        """
        began_s = time.monotonic()
        pipes = [Pipe(inward=True), *(Pipe(inward=False) for _ in range(3))]
        stdin, out, err, told = pipes
        try:
            self._start(live, pipes, seccomp, groups)
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
                    await live.end()
            out.drain_rest(self._out.feed)
            err.drain_rest(self._err.feed)
            return self._result(end, live.alive, time.monotonic() - began_s)
        finally:
            for pipe in pipes:
                pipe.close()

    def _start(
        self, live: Live, pipes: list[Pipe], seccomp: bytes | None, groups: tuple[str, ...]
    ) -> int:
        stdin, out, err, told = pipes
        try:
            return enter.start(
                enter.Entrance(
                    argv=self._command.argv, limits=self._command.limits, seccomp=seccomp,
                    stdin=stdin.inner, stdout=out.inner, stderr=err.inner, told=told.inner,
                    init=live.init, groups=groups,
                )
            )  # fmt: skip
        except OSError as error:
            raise SandboxError(f"a command could not be started: {error}") from error

    async def _end(self, told: Pipe) -> bytes | None:
        """What the usher tells, empty if it was killed; None where time ran out or `kill` came
        first.
        """
        ends = [asyncio.ensure_future(wait) for wait in (told.word(), self._stopped.wait())]
        try:
            await asyncio.wait(
                ends, timeout=self._command.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            return ends[0].result() if ends[0].done() else None
        finally:
            for end in ends:
                end.cancel()

    def _result(self, end: bytes | None, alive: bool, duration_s: float) -> ExecResult:
        exit_code, timed_out = None, end is None and not self._stopped.is_set()
        if end is not None:
            status = enter.end_told(end)
            if isinstance(status, str):
                if alive:
                    raise SandboxError(f"a command could not enter its sandbox: {status}")
                # What runs inside ended the sandbox's processes before it was in: its own doing.
                status = int(signal.SIGKILL)
            exit_code = _exit_code(status)
        return ExecResult(
            exit_code=exit_code,
            stdout=self._out.text(),
            stderr=self._err.text(),
            timed_out=timed_out,
            truncated=self._out.truncated or self._err.truncated,
            duration_s=duration_s,
        )


def _exit_code(status: int) -> int:
    """As a shell tells it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
