"""The live namespaces of one sandbox: bubblewrap with a program inside that only waits.

Commands enter them (`command`). The program is their first process: nothing inside can end it, the
kernel collects orphans for it (it was started with SIGCHLD ignored), and with it the kernel ends
every process in them, daemons and `setsid` children included. The one thing that must stay true:
nothing enters before bubblewrap has finished setting up, and after `end` no process of the
namespaces is alive.

Its processes are brought to a stand by their control group where that can: in the kernel, whatever
they do. Without it each is sent a signal, which one that forks without pause, or is woken by
another, may outrun; `stop` says that all stand still only where nothing moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any

from posttrain.core.errors import SandboxError
from posttrain.sandbox import cgroups, egress, usher
from posttrain.sandbox.cgroups import CgroupPlace
from posttrain.sandbox.pipes import Pipe, Process, memory_file, ready

_SETUP_S = 20.0
"""Bubblewrap's set-up takes 5 ms; past this the machine is taken to be stuck."""
_DEATH_S = 20.0
_NUMBERS = itertools.count(1)
_WAITING = b"/bin/cat"
"""The program inside: it echoes one line, which tells that it was started, and reads on."""
_MOST_ROUNDS, _PAUSE_S = 100, 0.002
"""Of signals, and of looks at a group that is being frozen: a process stops once it was next to run
and the kernel has done what it does for it.
"""


class Live:
    """One set of namespaces. Make it with `start`."""

    def __init__(self, outer: Process, init: Process, first: int, held: Pipe) -> None:
        self._outer = outer
        self._init = init
        self._first = first
        self._space = _space(first)
        self._held = held
        self._line: socket.socket | None = None
        self._usher: Process | None = None
        self._freezer: str | None = None
        self._stopped = False
        self.number = next(_NUMBERS)
        self.door: int | None = None
        """A socket that listens in the namespaces, where the usher was asked to open one."""
        self._condemned = self._closed = False
        self._over = asyncio.Event()

    async def admit(self, ushers: usher.Ushers, *, group: CgroupPlace | None, door: bool) -> None:
        """Send an usher in, which joins the group; with `door` it opens one.

        Raises:
            SandboxError: it could not get in.
        """
        try:
            self._freezer = group.freezer if group else None
            self._line, pid = ushers.start(
                self._init.descriptor, groups=group.entrances if group else (),
                port=egress.ADDRESS[1] if door else None,
            )  # fmt: skip
            self._line.setblocking(False)
            self._usher = Process(pid)
            async with asyncio.timeout(_SETUP_S):
                said, files = await self._said()
            self.door = files[0] if files else None
            problem = "" if said == usher.READY else said.decode("utf-8", "replace") or "it died"
        except (OSError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            await self.end()
            raise SandboxError(f"an usher could not enter a sandbox: {problem}")

    async def _said(self) -> tuple[bytes, list[int]]:
        """What the usher says first, and what it hands out."""
        assert self._line is not None, "an usher was started"
        await ready(self._line.fileno())
        said, files, _, _ = socket.recv_fds(self._line, 1000, 1)
        for number in files:
            os.set_inheritable(number, False)
        return said, files

    @property
    def broken(self) -> str:
        """What an usher said that met a fault of ours; empty where it works or was killed."""
        assert self._line is not None, "an usher was admitted"
        with contextlib.suppress(OSError):
            return self._line.recv(1000).decode("utf-8", "replace")
        return ""

    def order(self, command: usher.Command, files: Sequence[int]) -> None:
        """Ask the usher for a command; where it is gone the command's end is told as empty."""
        assert self._line is not None, "an usher was admitted"
        with contextlib.suppress(OSError):
            usher.order(self._line, command, files)

    @property
    def alive(self) -> bool:
        """Whether commands can still enter."""
        return not (
            self._condemned
            or self._closed
            or any(process.ended.done() for process in self._processes)
        )

    @property
    def _processes(self) -> list[Process]:
        """Those of ours; with the usher, whose children may have it as their parent for good."""
        ours = (self._init, self._outer, self._usher)
        return list(dict.fromkeys(process for process in ours if process is not None))

    # --- standing still ---------------------------------------------------------------------------

    async def stop(self) -> bool:
        """Stop the usher, so that nothing begins, and all others; whether all stand still."""
        if self._closed or self._usher is None:
            return True
        self._stopped = True
        if self._freezer is None:
            return await self._stop_each(self._usher)
        cgroups.freeze(self._freezer)
        for _ in range(_MOST_ROUNDS):
            if cgroups.stands_still(self._freezer):
                return True
            await asyncio.sleep(_PAUSE_S)
        return False

    def go_on(self) -> None:
        """Let them go on. Idempotent."""
        stopped, self._stopped = self._stopped, False
        if stopped and self._freezer is not None:
            cgroups.thaw(self._freezer)
        elif stopped and self._usher is not None:
            for pid in self._members(self._usher)[0]:
                _signal(pid, signal.SIGCONT)

    async def _stop_each(self, usher: Process) -> bool:
        """Two rounds in a row have to find that all stand still and nobody is new: a child that one
        had before it stopped may have come after the list was read.
        """
        settled: set[int] = set()
        for _ in range(_MOST_ROUNDS):
            members, missed = self._members(usher)
            running = [pid for pid in members if not _is_stopped(pid)]
            if not running and not missed and settled.issuperset(members):
                return True
            settled = set() if running or missed else set(members)
            for pid in running:
                _signal(pid, signal.SIGSTOP)
            await asyncio.sleep(_PAUSE_S)
        return False

    def _members(self, usher: Process) -> tuple[list[int], bool]:
        """The usher and the processes inside but for the first, which only waits; and whether some
        ended before it was known where they were: they may have left children that are not in the
        list.
        """
        numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        spaces = {pid: _space(pid) for pid in numbers if pid not in (self._first, usher.pid)}
        inside = [pid for pid, space in spaces.items() if space == self._space]
        left = [] if usher.ended.done() else [usher.pid]
        return [*left, *inside], None in spaces.values()

    # --- start and end ----------------------------------------------------------------------------

    @staticmethod
    async def start(
        *,
        bubblewrap: str,
        options: tuple[str, ...],
        seccomp: bytes | None,
        within: Callable[[], AbstractContextManager[None]],
    ) -> Live:
        """`within` takes this process to where the sandbox's disk is mounted, and back.

        Raises:
            SandboxError: bubblewrap could not set the namespaces up.
        """
        told, error = Pipe(inward=False), Pipe(inward=False)
        held, echo = Pipe(inward=True), Pipe(inward=False)
        pipes = (told, error, echo)
        try:
            with within():
                pid = _spawn(bubblewrap, options, seccomp, (held, echo, error, told))
        except OSError as problem:
            for pipe in (*pipes, held):
                pipe.close()
            raise SandboxError(f"bubblewrap could not be started: {problem}") from problem
        outer, init, first = Process(pid), None, pid
        try:
            async with asyncio.timeout(_SETUP_S):
                first = int(json.loads(await told.line())["child-pid"])
                init = Process(first)
                os.write(held.outer, b"up\n")
                if await _first_of(echo.line(), init.ended):
                    return Live(outer, init, first, held)
        except (OSError, ValueError, TimeoutError):
            pass
        finally:
            text = error.rest().decode("utf-8", "replace")
            for pipe in pipes:
                pipe.close()
        live = Live(outer, init or outer, first, held)
        await live.end()
        raise SandboxError(
            f"bubblewrap could not set up a sandbox: {text[-500:].strip() or 'no reason given'}",
            "run 'posttrain doctor'.",
        )

    def condemn(self) -> None:
        """Let nothing enter any more: its end is under way."""
        self._condemned = True

    async def end(self) -> None:
        """Kill everything inside and wait until it is dead. Idempotent.

        Raises:
            SandboxError: processes would not die.
        """
        if self._closed:
            await self._over.wait()
            return
        self._closed = True
        self.go_on()
        members = self._processes
        for process in members:
            process.kill()
        waited = [process.ended for process in members]
        _, pending = await asyncio.shield(asyncio.wait(waited, timeout=_DEATH_S))
        for process in members:
            process.close()
        self._held.close()
        if self._line is not None:
            self._line.close()
        if self.door is not None:
            os.close(self.door)
        self._over.set()
        if pending:
            raise SandboxError(f"processes of a sandbox would not die within {_DEATH_S:.0f} s.")


async def _first_of(line: Coroutine[Any, Any, bytes], end: asyncio.Future[None]) -> bytes:
    """The line, empty where the end comes first."""
    told = asyncio.ensure_future(line)
    try:
        await asyncio.wait((told, end), return_when=asyncio.FIRST_COMPLETED)
        return told.result() if told.done() else b""
    finally:
        told.cancel()
        await asyncio.wait((told,))


def _spawn(
    bubblewrap: str,
    options: tuple[str, ...],
    seccomp: bytes | None,
    pipes: tuple[Pipe, Pipe, Pipe, Pipe],
) -> int:
    """Start bubblewrap over (standard input, output, error, status); its ends are closed here."""
    *standard, told = pipes
    files = []
    words = [*options, "--json-status-fd", str(told.inner)]
    if seccomp is not None:
        files.append(memory_file("seccomp", seccomp))
        words += ["--seccomp", str(files[-1])]
    files.append(memory_file("args", b"".join(word.encode() + b"\0" for word in words)))
    actions = [(os.POSIX_SPAWN_DUP2, pipe.inner, number) for number, pipe in enumerate(standard)]
    for number in (told.inner, *files):
        os.set_inheritable(number, True)
    try:
        return os.posix_spawn(
            bubblewrap,
            [b"bwrap", b"--args", str(files[-1]).encode(), b"--", _WAITING],
            {},
            file_actions=actions,
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
        )
    finally:
        for pipe in pipes:
            pipe.close_inner()
        for number in files:
            with contextlib.suppress(OSError):
                os.close(number)


def _space(pid: int) -> int | None:
    """Which process namespace a process is in; None where it ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped or dead (proc(5)): the first may be dead while
    others run. A process that is gone may have left a child.
    """
    try:
        return all(
            _state(f"/proc/{pid}/task/{thread}/stat") in (b"T", b"Z", b"X")
            for thread in os.listdir(f"/proc/{pid}/task")
        )
    except OSError:
        return False


def _state(file: str) -> bytes:
    with open(file, "rb") as stat:
        return stat.read().rpartition(b")")[2].split()[0]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
