"""One command in one bubblewrap, from start to the death of its last process.

Runs in the holder. Every command has a process namespace of its own and no channel into this
process but its output pipes: its end is learnt from the kernel (pidfd) and its exit code from
bubblewrap outside. The one thing that must stay true: when `run` returns, no process of the command
is alive, `setsid` children included.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from posttrain.core.errors import SandboxError
from posttrain.core.ports import ExecResult
from posttrain.sandbox.limits import Clip

_SETUP_S = 20.0
"""Bubblewrap's set-up takes 5 ms; past this the machine is taken to be stuck."""
_DEATH_S = 20.0
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_EXEC_FAILED = "bwrap: execvp "


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

    def __init__(
        self,
        command: Command,
        *,
        bubblewrap: str,
        options: tuple[str, ...],
        within: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`within` takes this process to where the lease's disk is mounted, and back."""
        self._command = command
        self._within = within
        self._bubblewrap = bubblewrap
        self._options = options
        self._stopped = asyncio.Event()

    def kill(self) -> None:
        """End it early."""
        self._stopped.set()

    async def run(self, *, seccomp: bytes | None, enter: Callable[[int], None]) -> ExecResult:
        """Run to the end or the time limit; `enter` moves the waiting init into its group.

        Raises:
            SandboxError: bubblewrap could not set the sandbox up, or its processes would not die.
        """
        started_s = time.monotonic()
        pipes = _Pipes()
        try:
            pid = self._start(pipes, seccomp)
        except (OSError, ValueError) as error:
            pipes.close()
            return _refused(error)
        try:
            return await self._attend(pid, pipes, enter, started_s)
        finally:
            pipes.close()

    def _start(self, pipes: _Pipes, seccomp: bytes | None) -> int:
        options = [*self._options, "--json-status-fd", str(pipes.status.inner)]
        options += ["--block-fd", str(pipes.gate.inner)]
        if seccomp is not None:
            options += ["--seccomp", str(pipes.file("seccomp", seccomp))]
        args = pipes.file("args", b"".join(option.encode() + b"\0" for option in options))
        actions = [
            (os.POSIX_SPAWN_DUP2, end, number)
            for number, end in enumerate((pipes.stdin.inner, pipes.out.inner, pipes.err.inner))
        ]
        with pipes.lent_to_child(), self._within():
            return os.posix_spawn(
                self._bubblewrap,
                [b"bwrap", b"--args", str(args).encode(), b"--", *self._command.argv],
                {},
                file_actions=actions,
                setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
            )

    async def _attend(
        self, pid: int, pipes: _Pipes, enter: Callable[[int], None], started_s: float
    ) -> ExecResult:
        out, err = Clip(self._command.cap_bytes), Clip(self._command.cap_bytes)
        with contextlib.ExitStack() as stack:
            outer = _Process(pid, stack)
            inner, timed_out, problem = None, False, ""
            drained = [pipes.out.drain(out.feed), pipes.err.drain(err.feed)]
            feeding = asyncio.ensure_future(pipes.stdin.feed(self._command.stdin))
            try:
                inner = await self._open_gate(outer, pipes, stack, enter)
                timed_out = not await self._wait(outer)
            except (OSError, ValueError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
            finally:
                feeding.cancel()
                await _bury(outer, inner, drained)
        status = pipes.status.text()
        if not (pipes.gate_passed or timed_out or self._stopped.is_set()):
            raise SandboxError(
                f"bubblewrap could not set up a sandbox: {problem} {err.text()[-500:].strip()}",
                "run 'posttrain doctor'.",
            )
        return self._result(status, out, err, timed_out, time.monotonic() - started_s)

    async def _open_gate(
        self, outer: _Process, pipes: _Pipes, stack: contextlib.ExitStack,
        enter: Callable[[int], None],
    ) -> _Process | None:  # fmt: skip
        """Wait for the sandbox's init, limit it, and let it go on; None if it never came."""
        async with asyncio.timeout(_SETUP_S):
            pid = await pipes.status.child_pid()
        if pid is None:
            return None
        inner = _Process(pid, stack)
        for name, value in self._command.limits.items():
            resource.prlimit(pid, getattr(resource, name), (value, value))
        enter(pid)
        if not self._stopped.is_set():
            pipes.open_gate()
        return inner

    async def _wait(self, outer: _Process) -> bool:
        """Until the command ended or was stopped; False if its time ran out first."""
        stopped = asyncio.ensure_future(self._stopped.wait())
        ends: set[asyncio.Future[Any]] = {outer.ended, stopped}
        try:
            done, _ = await asyncio.wait(
                ends,
                timeout=self._command.timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            stopped.cancel()
        return bool(done)

    def _result(
        self, status: str, out: Clip, err: Clip, timed_out: bool, duration_s: float
    ) -> ExecResult:
        exit_code, stderr = _exit_code(status), err.text()
        if exit_code is None and stderr.startswith(_EXEC_FAILED) and not timed_out:
            stderr = stderr.removeprefix(_EXEC_FAILED)
            missing = stderr.rstrip().endswith(os.strerror(errno.ENOENT))
            exit_code = _NOT_FOUND if missing else _NOT_EXECUTABLE
        return ExecResult(
            exit_code=None if timed_out else exit_code,
            stdout=out.text(),
            stderr=stderr,
            timed_out=timed_out,
            truncated=out.truncated or err.truncated,
            duration_s=duration_s,
        )


def _refused(error: OSError | ValueError) -> ExecResult:
    """The kernel would not take the command line (too long): the command's own failure."""
    if isinstance(error, OSError) and error.errno not in (errno.E2BIG, errno.EINVAL):
        raise SandboxError(f"bubblewrap could not be started: {error}") from error
    return ExecResult(exit_code=_NOT_EXECUTABLE, stdout="", stderr=f"{error}\n")


def _exit_code(status: str) -> int | None:
    """Bubblewrap reports it only for a command that was started and ended by itself."""
    for line in status.splitlines():
        record = json.loads(line)
        if "exit-code" in record:
            return int(record["exit-code"])
    return None


async def _bury(
    outer: _Process, inner: _Process | None, drained: list[asyncio.Future[None]]
) -> None:
    """Kill both ends of the tree and wait for them and for the last of their output. The init's
    pidfd tells that its whole namespace is gone (pid_namespaces(7)).
    """
    members = [process for process in (inner, outer) if process is not None]
    for process in members:
        process.kill()
    waited = [process.ended for process in members] + drained
    _, pending = await asyncio.wait(waited, timeout=_DEATH_S)
    for process in members:
        process.reap()
    if pending:
        raise SandboxError(f"processes of a sandbox would not die within {_DEATH_S:.0f} s.")


class _Process:
    """A process known by descriptor, so that its number cannot be mistaken."""

    def __init__(self, pid: int, stack: contextlib.ExitStack) -> None:
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._pidfd, self._end)
        stack.callback(os.close, self._pidfd)
        stack.callback(asyncio.get_running_loop().remove_reader, self._pidfd)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        if not self.ended.done():
            self.ended.set_result(None)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def reap(self) -> None:
        """Collect it, if it is ours to collect (an orphaned init is; see `adopt_orphans`)."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, os.WNOHANG)


class _Pipe:
    """A pipe with one end for the sandbox (`inner`) and one for us (`outer`)."""

    def __init__(self, *, inward: bool) -> None:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        self.inner, self.outer = (read_end, write_end) if inward else (write_end, read_end)
        os.set_blocking(self.outer, False)
        self._text = bytearray()

    def drain(self, feed: Callable[[bytes], None]) -> asyncio.Future[None]:
        """Hand everything to `feed`; done at its end."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def readable() -> None:
            with contextlib.suppress(BlockingIOError):
                data = os.read(self.outer, 1 << 16)
                feed(data)
                if not data:
                    loop.remove_reader(self.outer)
                    done.set_result(None)

        loop.add_reader(self.outer, readable)
        return done

    async def feed(self, data: bytes) -> None:
        """Write everything, then close; a reader that went away ends it quietly."""
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):
            while view:
                try:
                    view = view[os.write(self.outer, view) :]
                except BlockingIOError:
                    await self._ready(writing=True)
        self.close_outer()

    async def child_pid(self) -> int | None:
        """From bubblewrap's first status line (`--json-status-fd`); None at its end."""
        while b"\n" not in self._text:
            await self._ready(writing=False)
            data = os.read(self.outer, 1 << 16)
            if not data:
                return None
            self._text += data
        return int(json.loads(self._text.partition(b"\n")[0])["child-pid"])

    def text(self) -> str:
        """Everything that came, once the writer is dead."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.outer, 1 << 16):
                self._text += data
        return self._text.decode("utf-8", "replace")

    async def _ready(self, *, writing: bool) -> None:
        """Until our end can be written or read."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        (loop.add_writer if writing else loop.add_reader)(self.outer, ready.set)
        try:
            await ready.wait()
        finally:
            (loop.remove_writer if writing else loop.remove_reader)(self.outer)

    def close_outer(self) -> None:
        if self.outer >= 0:
            asyncio.get_running_loop().remove_reader(self.outer)
            asyncio.get_running_loop().remove_writer(self.outer)
            os.close(self.outer)
            self.outer = -1

    def close_inner(self) -> None:
        if self.inner >= 0:
            os.close(self.inner)
            self.inner = -1


class _Pipes:
    """Every descriptor of one run."""

    def __init__(self) -> None:
        self.stdin, self.gate = _Pipe(inward=True), _Pipe(inward=True)
        self.out, self.err = _Pipe(inward=False), _Pipe(inward=False)
        self.status = _Pipe(inward=False)
        self._files: list[int] = []
        self._gate_opened = False

    def file(self, name: str, data: bytes) -> int:
        """A file in memory for the child to read."""
        number = os.memfd_create(name, os.MFD_CLOEXEC)
        self._files.append(number)
        os.write(number, data)
        os.lseek(number, 0, os.SEEK_SET)
        return number

    @contextlib.contextmanager
    def lent_to_child(self) -> Iterator[None]:
        """The child inherits its ends; afterwards only the child has them, but for the gate."""
        for number in (self.status.inner, self.gate.inner, *self._files):
            os.set_inheritable(number, True)
        try:
            yield
        finally:
            for pipe in (self.stdin, self.out, self.err, self.status):
                pipe.close_inner()
            os.set_inheritable(self.gate.inner, False)
            for number in self._files:
                os.close(number)
            self._files.clear()

    def open_gate(self) -> None:
        """Let the init go on once it has finished setting up."""
        os.write(self.gate.outer, b"x")
        self._gate_opened = True

    @property
    def gate_passed(self) -> bool:
        """Whether the init took the byte, hence finished setting up: no command can forge this."""
        waiting = array.array("i", [0])
        fcntl.ioctl(self.gate.inner, termios.FIONREAD, waiting)
        return self._gate_opened and waiting[0] == 0

    def close(self) -> None:
        """Close whatever is open."""
        for pipe in (self.stdin, self.gate, self.out, self.err, self.status):
            pipe.close_inner()
            pipe.close_outer()
        for number in self._files:
            os.close(number)
