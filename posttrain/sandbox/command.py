"""One command in a sandbox that is live, from its start to its end.

The command has no channel into this process but its output pipes; its end is told by the usher
outside its namespaces. The one thing that must stay true: a command that its time limit or a `kill`
ended has left no process, `setsid` children included.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from posttrain.core.containment import ExecResult
from posttrain.core.errors import SandboxError
from posttrain.sandbox import usher
from posttrain.sandbox.pipes import Pipe
from posttrain.sandbox.usher import Command

_KILLED = 128 + signal.SIGKILL
_START_S = 60.0
"""What the start of a command may take where it is not its own time."""


class Place(Protocol):
    """Where a command is run, with others that ran before."""

    @property
    def broken(self) -> str:
        """A fault of ours; empty where there is none."""
        ...

    def order(self, command: Command, files: Sequence[int]) -> None:
        """Start a command over (standard input, output, error, where its end is told)."""
        ...

    def condemn(self) -> None:
        """Let nothing enter any more: its end is under way."""
        ...

    async def end(self) -> None:
        """End every process there; idempotent."""
        ...


class Begun:
    """A command that was started and waits for its input."""

    def __init__(self, live: Place, command: Command) -> None:
        """Start it, of the command without input and time.

        Raises:
            OSError: there are no descriptors left.
        """
        self._command = command
        self.pipes: list[Pipe] = []
        """Standard input, output, error, and where its end is told."""
        try:
            for inward in (True, False, False, False):
                self.pipes.append(Pipe(inward=inward))
            live.order(command, [pipe.inner for pipe in self.pipes])
            for pipe in self.pipes:
                pipe.close_inner()
        except BaseException:
            self.close()
            raise

    def is_of(self, command: Command) -> bool:
        """Whether it was started as this command would be."""
        ours = (self._command.argv, self._command.limits, self._command.variables)
        return ours == (command.argv, command.limits, command.variables)

    def close(self) -> None:
        """Let go of it; nothing comes to its input any more."""
        for pipe in self.pipes:
            pipe.close()


class Run:
    """A command that is being run; `kill`, `freeze` and `thaw` may be called at any time."""

    def __init__(
        self,
        command: Command,
        *,
        listen: Callable[[str, bytes], None] | None = None,
        opening: bytes = b"",
    ) -> None:
        """`opening` are the bytes that its output begins with once it is started, where starting
        takes time that is not its own.
        """
        self._command = command
        self._listen = listen
        self._opening, self._opened = opening, bytearray()
        self._begun = asyncio.Event()
        self._stopped = asyncio.Event()
        self._live: Place | None = None
        self._watch = Stopwatch(command.timeout_s + (_START_S if opening else 0.0))
        self._out, self._err = Clip(command.cap_bytes), Clip(command.cap_bytes)

    def kill(self) -> None:
        """End it early; commands from now on do not enter what ends with it."""
        self._stopped.set()
        if self._live is not None:
            self._live.condemn()

    @property
    def stopped(self) -> bool:
        """Whether it was ended early, or is to be."""
        return self._stopped.is_set()

    def freeze(self) -> None:
        """Its time stands still."""
        self._watch.stop()

    def thaw(self) -> None:
        """Its time goes on."""
        self._watch.go_on()

    @property
    def begun(self) -> bool:
        """Whether the opening came, and nothing else in its place."""
        return self._opened == self._opening

    async def has_begun(self) -> None:
        """Until the opening came."""
        await self._begun.wait()

    async def run(self, live: Place, begun: Begun | None = None) -> ExecResult:
        """Run to the end or the time limit; it may have `begun`, and is closed here then. A command
        that ends by itself may leave processes in the sandbox; one that is ended takes all of the
        sandbox's processes with it.

        Raises:
            SandboxError: the command could not be started, or would not die.
        """
        if self._stopped.is_set():
            if begun is not None:
                begun.close()
            return self._result(None)
        self._live = live
        self._watch.go_on()
        begun = begun or Begun(live, self._command)
        stdin, out, err, told = begun.pipes
        try:
            feeding = asyncio.ensure_future(stdin.feed(self._command.stdin))
            out.drain(self._after_opening(self._feeder("stdout", self._out)))
            err.drain(self._feeder("stderr", self._err))
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
            out.drain_rest(self._after_opening(self._feeder("stdout", self._out)))
            err.drain_rest(self._feeder("stderr", self._err))
            return self._result(end)
        finally:
            begun.close()

    async def _end(self, told: Pipe) -> bytes | None:
        """What the usher tells, empty if it was ended with the sandbox's processes; None where
        time ran out or `kill` came first.
        """
        word = asyncio.ensure_future(told.word())
        stopped = asyncio.ensure_future(self._stopped.wait())
        late = asyncio.ensure_future(self._watch.ran_out())
        try:
            await asyncio.wait((word, stopped, late), return_when=asyncio.FIRST_COMPLETED)
            return word.result() if word.done() else None
        finally:
            for wait in (word, stopped, late):
                wait.cancel()

    def _feeder(self, name: str, clip: Clip) -> Callable[[bytes], None]:
        """What takes a stream's bytes: the clip, and whoever listens until the cap."""

        def feed(data: bytes) -> None:
            room = self._command.cap_bytes - clip.total_bytes
            clip.feed(data)
            if self._listen is not None and data[: max(room, 0)]:
                self._listen(name, data[:room])

        return feed

    def _after_opening(self, feed: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """The command's own time begins with the end of the opening."""

        def fed(data: bytes) -> None:
            missing = len(self._opening) - len(self._opened)
            if missing:
                self._opened += data[:missing]
                data = data[missing:]
                if self.begun:
                    self._begun.set()
                    self._watch.restart(self._command.timeout_s)
            feed(data)

        return fed

    def _result(self, end: bytes | None) -> ExecResult:
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
            duration_s=self._watch.active_s,
        )


class Stopwatch:
    """Active time against a limit, standing still at first."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._before_s = 0.0
        self._since_s: float | None = None
        self._changed = asyncio.Event()

    @property
    def active_s(self) -> float:
        """Seconds so far, those stopped not counted."""
        running_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
        return self._before_s + running_s

    def restart(self, limit_s: float) -> None:
        """Count anew, standing still or not as before."""
        self._limit_s, self._before_s = limit_s, 0.0
        if self._since_s is not None:
            self._since_s = time.monotonic()
        self._changed.set()

    def stop(self) -> None:
        """Stand still. Idempotent."""
        self._before_s, self._since_s = self.active_s, None
        self._changed.set()

    def go_on(self) -> None:
        """Run again. Idempotent."""
        if self._since_s is None:
            self._since_s = time.monotonic()
        self._changed.set()

    async def ran_out(self) -> None:
        """Until the limit is reached."""
        while (left_s := self._limit_s - self.active_s) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self._since_s is None else left_s):
                    await self._changed.wait()


class Clip:
    r"""Collects one output stream, keeping its head and its tail within a cap in bytes.

    >>> clip = Clip(10); clip.feed(b"0123456789abcdef"); clip.truncated
    True
    >>> clip.text()
    '01234\n[... 6 of 16 bytes left out ...]\nbcdef'
    """

    def __init__(self, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self._head_bytes = cap_bytes // 2
        self._tail_bytes = cap_bytes - self._head_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total_bytes += len(data)
        room = self._head_bytes - len(self._head)
        self._head += data[:room]
        self._tail += data[room:][-self._tail_bytes :] if self._tail_bytes else b""
        if len(self._tail) > 2 * self._tail_bytes:
            del self._tail[: -self._tail_bytes]

    @property
    def truncated(self) -> bool:
        """Whether the stream passed the cap."""
        return self.total_bytes > self._cap_bytes

    def text(self) -> str:
        """The stream as text; bytes that are not UTF-8 become U+FFFD, none of them at the cut."""
        if not self.truncated:
            return bytes(self._head + self._tail).decode("utf-8", "replace")
        tail = bytes(self._tail[-self._tail_bytes :]) if self._tail_bytes else b""
        skip = next((i for i, byte in enumerate(tail[:3]) if byte & 0xC0 != 0x80), 3)
        head = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(self._head))
        left_out = self.total_bytes - len(self._head) - len(tail)
        note = f"\n[... {left_out} of {self.total_bytes} bytes left out ...]\n"
        return head + note + tail[skip:].decode("utf-8", "replace")
