"""The live half of a container sandbox: a container in which commands run and which can be lost.

Its first process only waits, as a user that commands can neither signal nor look into; with it the
kernel ends every process inside. It ends when its input does, so nothing is left of a caller that
was killed. The one thing that must stay true: no file is lost with it (`store`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.core.errors import SandboxError
from posttrain.core.task import Environment
from posttrain.sandbox import spec, usher
from posttrain.sandbox.cgroups import CgroupPlace, cgroup_places
from posttrain.sandbox.channel import Channel
from posttrain.sandbox.command_line import (
    WAITER_ID,
    CallError,
    CommandLine,
    Container,
    Mount,
    possible,
    whole_pages,
)
from posttrain.sandbox.usher import Command

_WAITER = ("/usr/bin/env", "--ignore-signal=CHLD", "/usr/bin/cat")
"""It echoes the one line that tells that it was started; the kernel collects orphans for it."""
_SETUP_S = 60.0
_HANG_UP_S = 5.0
_DEATH_S = 30.0
_MOST_ERRORS_BYTES = 1 << 16


def start_client(words: Sequence[str], errors: int, descriptor: int) -> int:
    """Start a program of the host over a line; returns its number."""
    return os.posix_spawn(
        words[0],
        list(words),
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, descriptor, 0),
            (os.POSIX_SPAWN_DUP2, descriptor, 1),
            (os.POSIX_SPAWN_DUP2, errors, 2),
        ],
        setsid=True,
        setsigdef=(signal.SIGINT, signal.SIGPIPE, signal.SIGTERM),
        setsigmask=(),
    )


class Client:
    """A container that runs until its line is hung up, and what its program complained of."""

    def __init__(self, line: CommandLine, container: Container) -> None:
        self.name = container.name
        self._line = line
        self._errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        start = functools.partial(start_client, line.run(container), self._errors)
        self.channel = Channel(start, name=f"the container {container.name}")

    @property
    def complaint(self) -> str:
        """The end of what the program said."""
        size = os.fstat(self._errors).st_size
        data = os.pread(self._errors, _MOST_ERRORS_BYTES, max(0, size - _MOST_ERRORS_BYTES))
        return data.decode("utf-8", "replace").strip()[-400:] or "no reason given"

    async def end(self) -> None:
        """Hang up and wait for the end, which is made where it does not come by itself.

        Raises:
            SandboxError: it would not end.
        """
        self.channel.close()
        ending = asyncio.ensure_future(self.channel.closed())
        try:
            done, _ = await asyncio.wait((ending,), timeout=_HANG_UP_S)
            if not done:
                with contextlib.suppress(CallError):
                    await self._line.call("kill", self.name)
                done, _ = await asyncio.wait((ending,), timeout=_DEATH_S)
        finally:
            ending.cancel()
        if not done:
            raise SandboxError(f"the container {self.name} would not end within {_DEATH_S:.0f} s.")

    def close(self) -> None:
        """Let go of what is kept of it here. Once."""
        os.close(self._errors)


class Cell:
    """One container of commands. Make it with `start`."""

    def __init__(self, line: CommandLine, client: Client) -> None:
        self._line = line
        self._client = client
        self._clients = set[asyncio.Task[None]]()
        self._ending = asyncio.Lock()
        self._hung_up = self._ended = self._paused = False
        self.place: CgroupPlace | None = None
        """Control groups that hold it whole; None where there are none."""
        self.broken = ""

    @staticmethod
    async def start(
        line: CommandLine,
        name: str,
        mounts: tuple[Mount, ...],
        environment: Environment,
    ) -> Cell:
        """Start the container and wait until it is up.

        Raises:
            SandboxError: it could not be started.
        """
        container = Container(
            name=name, user=WAITER_ID, mounts=mounts, memory_bytes=environment.memory_bytes,
            processes=environment.max_processes, cores=environment.cores, argv=_WAITER,
            folder=spec.WORKSPACE, open_files=environment.max_open_files,
        )  # fmt: skip
        cell = Cell(line, Client(line, container))
        try:
            async with asyncio.timeout(_SETUP_S):
                await cell._client.channel.request({"op": "up"})
            cell.place = await cell._find_place(environment)
        except (SandboxError, TimeoutError) as error:
            complaint = cell._client.complaint
            await cell.end()
            raise SandboxError(
                f"a container could not be started: {complaint}", "run 'posttrain doctor'."
            ) from error
        except asyncio.CancelledError:
            await cell.end()
            raise
        return cell

    async def _find_place(self, environment: Environment) -> CgroupPlace | None:
        """Where the kernel counts it, if its limits are really there."""
        with contextlib.suppress(OSError, ValueError):
            name = self._client.name
            pid = int(await self._line.call("inspect", "--format={{.State.Pid}}", name))
            own = Path(f"/proc/{pid}/cgroup").read_text()
            found = cgroup_places(own, Path("/proc/self/mountinfo").read_text())[:1]
            for place in found:
                memory_bytes = whole_pages(environment.memory_bytes)
                wanted = place.settings(memory_bytes=memory_bytes, max_processes=0)
                if _holds(*next(iter(wanted.items()))):
                    quota = place.quota(possible(environment.cores))
                    bounded = bool(quota) and all(_holds(*one) for one in quota.items())
                    return place if bounded else replace(place, cpu=None)
        return None

    @property
    def alive(self) -> bool:
        """Whether commands can still enter."""
        return not (self._hung_up or self._client.channel.lost)

    @property
    def perished(self) -> bool:
        """Whether it ended, and not because we did it: nothing inside can end its first process but
        want of memory.
        """
        return self._client.channel.lost and not self._hung_up

    @property
    def deaths(self) -> int:
        """Processes that were killed for want of memory so far."""
        return self.place.oom_kills() if self.place else 0

    def use(self) -> tuple[int | None, int | None]:
        """Bytes of memory and processes in use, where that can be told."""
        if self.place is None or not self.alive:
            return (None, None) if self.alive else (0, 0)
        try:
            memory, processes = self.place.usage()
        except OSError:
            return None, None
        return memory, None if self._line.is_gvisor else max(0, processes - 1)

    def order(self, command: Command, files: Sequence[int]) -> None:
        """As `command.Place` says; the first word is what the command is to say when it is there,
        before anything else.
        """
        opening, *words = command.argv
        ours = [os.dup(number) for number in files]
        called = self._line.exec(
            self._client.name, [os.fsdecode(word) for word in words],
            opening=opening.decode("ascii"), limits=command.limits, variables=command.variables,
            drains=bool(command.stdin),
        )  # fmt: skip
        task = asyncio.ensure_future(_carry_out(called, ours, opening))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def pause(self) -> None:
        """Stop every process.

        Raises:
            SandboxError: the program could not.
        """
        await self._call("pause")
        self._paused = True

    async def go_on(self) -> None:
        """Let them go on."""
        if self._paused and not self._client.channel.lost:
            await self._call("unpause")
        self._paused = False

    async def _call(self, what: str) -> None:
        try:
            await self._line.call(what, self._client.name)
        except CallError as error:
            if self.alive:
                raise SandboxError(f"a container did not {what}: {error}") from error

    def condemn(self) -> None:
        """Let it end; no command enters any more."""
        self._hung_up = self._hung_up or not self._client.channel.lost
        self._client.channel.close()

    async def end(self) -> None:
        """End every process inside. Idempotent.

        Raises:
            SandboxError: they would not end.
        """
        self.condemn()
        async with self._ending:
            if self._ended:
                return
            with contextlib.suppress(SandboxError):
                await self.go_on()
            await self._client.end()
            if self._clients:
                await asyncio.wait(self._clients)
            self._client.close()
            self._ended = True


def _holds(file: str, text: str) -> bool:
    return Path(file).read_text().strip() == text


async def _carry_out(words: Sequence[str], files: Sequence[int], opening: bytes) -> None:
    """Run the program over (standard input, output, error) and tell its end on the fourth file. One
    that cannot be started for what it was told to run is the command's failure.
    """
    *standard, told = files
    stdin, out, error = standard
    process, code = None, usher.NOT_EXECUTABLE
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=stdin, stdout=out, stderr=error
            )
        except (OSError, ValueError) as problem:
            os.write(out, opening)
            os.write(error, f"the command could not be started: {problem}\n".encode())
        finally:
            for number in standard:
                os.close(number)
        if process is not None:
            code = await process.wait()
        with contextlib.suppress(BrokenPipeError):
            os.write(told, usher.end_of(code if code >= 0 else 128 - code))
    finally:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        os.close(told)
