"""What the container driver hands out: a leased sandbox, and a sealed workspace.

Each is a disk (`store`), and a sandbox from its first command on a container of commands over it
(`cell`). The one thing that must stay true: whatever happens inside, a call ends in its result or
in `SandboxError`, and files are lost with neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from posttrain.core.containment import ExecResult, Sealed, Usage
from posttrain.core.errors import SandboxError, UsageError
from posttrain.core.task import Environment
from posttrain.sandbox import spec, usher
from posttrain.sandbox.cell import Cell
from posttrain.sandbox.command import Command, Run
from posttrain.sandbox.command_line import CommandLine
from posttrain.sandbox.leased import Held, SealedWorkspace
from posttrain.sandbox.leases import Leases, LeaseState
from posttrain.sandbox.limits import process_limits
from posttrain.sandbox.store import Store, ensure_mountable

_Result = TypeVar("_Result")
_MOST_TRIES = 3
"""Of starting a command: it may meet a container that what runs there has ended this moment."""


class SealedStore(SealedWorkspace):
    """What an attempt left (`containment.Sealed`), kept by its vault."""

    def __init__(self, name: str, store: Store, leases: Leases) -> None:
        super().__init__(name, store.channel, leases)
        self.store = store

    async def seal(self) -> None:
        """Make it so. Nothing may run over its disk."""
        await self._ask("seal")
        self._leases.move(self.name, LeaseState.SEALED)

    async def close(self) -> None:
        """As the port says."""
        if self._leases.state(self.name) is not LeaseState.CLOSED:
            self._leases.move(self.name, LeaseState.CLOSED)
            await self.store.leave()


class ContainerSandbox(Held):
    """One lease (`containment.Sandbox`). Make it with `open`."""

    def __init__(
        self,
        name: str,
        line: CommandLine,
        store: Store,
        leases: Leases,
        environment: Environment,
        *,
        beside: Store | None = None,
        guarded: bool = True,
    ) -> None:
        super().__init__(name, store.channel, leases)
        self._line = line
        self._store = store
        self._beside = beside.use() if beside else None
        self._environment = environment
        self._guards = spec.guards(environment if guarded else Environment())
        self._standing = dict[tuple[str, ...], str]()
        self._cell: Cell | None = None
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._runs = set[Run]()
        self._memory_lost = False
        """Whether processes of commands have ended, which no command's result has told yet."""

    async def lay(self, *, fresh: bool, strict: bool) -> None:
        """Lay the environment's files on a disk that is `fresh`, and look at what is guarded, all
        of which is there where no policy was yet (`strict`).

        Raises:
            UsageError: a path is none. SandboxError: something is in the way, or is missing.
        """
        ensure_mountable(self._guards)
        self._memory_lost = not strict
        try:
            for path, text in self._environment.files.items() if fresh else ():
                parts, data = spec.workspace_parts(path), text.encode("utf-8", "replace")
                await self._ask("write", data, parts=parts)
            await self._look()
        except OSError as error:
            raise SandboxError(f"a sandbox could not be laid out: {error}") from error
        missing = ["/".join(path) for path, kind in self._standing.items() if not kind]
        if strict and missing:
            raise SandboxError(f"a sandbox could not be laid out: {missing[0]}: nothing is there.")

    async def _look(self) -> None:
        """What is at the guarded paths, while nothing moves."""
        paths = [*self._guards["read_only"], *self._guards["hidden"]]
        kinds = (await self._ask("kinds", paths=paths)).head["kinds"] if paths else []
        self._standing = dict(zip(paths, kinds, strict=True))

    def _ensure_open(self) -> None:
        state = self._leases.state(self.name)
        if state is not LeaseState.OPEN:
            raise SandboxError(f"sandbox {self.name} is not open but {state}.")

    # --- commands ---------------------------------------------------------------------------------

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        listen: Callable[[str, bytes], None] | None = None,
    ) -> ExecResult:
        """As the port says; the way into the container is not counted as the command's time.

        Raises:
            UsageError: there is no command or no time. SandboxError: the sandbox was lost.
        """
        self._ensure_open()
        limit_s = self._environment.exec_timeout_s if timeout_s is None else timeout_s
        if not argv or limit_s <= 0:
            raise UsageError(f"wanted a command and a time, got {list(argv)!r} and {limit_s} s.")
        opening = os.urandom(16).hex().encode()
        # A container of ours has no usher and no first process of the commands' user.
        most = {"RLIMIT_NPROC": self._environment.max_processes}
        command = Command(
            argv=(opening, *(os.fsencode(word) for word in argv)),
            stdin=stdin, timeout_s=limit_s, cap_bytes=self._environment.max_output_bytes,
            limits=process_limits(self._environment) | most, variables={},
        )  # fmt: skip
        lost = False
        for _ in range(_MOST_TRIES):
            run = Run(command, listen=listen, opening=opening)
            async with self._counted(run):
                started = await self._start(run)
                if started is None:
                    return ExecResult(exit_code=None, stdout="", stderr="")
                cell, before, task = started
                lost, self._memory_lost = lost or self._memory_lost, False
                result = await _or_end(asyncio.shield(task), run, cell)
            killed, full = cell.perished or cell.deaths > before, await self._disk_full()
            if run.begun or result.exit_code is None or cell.deaths > before:
                return replace(result, out_of_memory=killed, disk_full=full, memory_lost=lost)
            if cell.alive and self._thawed.is_set():
                if (cell.use()[1] or 0) >= self._environment.max_processes:
                    return replace(result, exit_code=usher.NOT_EXECUTABLE, disk_full=full)
                break
        raise SandboxError(f"a command could not be started: {result.stderr[-400:]}")

    @contextlib.asynccontextmanager
    async def _counted(self, run: Run) -> AsyncIterator[None]:
        """A command that can be ended, also while it waits to begin."""
        self._runs.add(run)
        try:
            yield
        finally:
            self._runs.discard(run)

    async def _start(self, run: Run) -> tuple[Cell, int, asyncio.Task[ExecResult]] | None:
        """Start a command, one at a time, when nothing is frozen: a container that is frozen on
        somebody's way in may hang. The container, how many it had killed, and what will be the
        result; None where the command was ended before.
        """
        while True:
            await self._thawed.wait()
            async with self._starting:
                self._ensure_open()
                if run.stopped:
                    return None
                if not self._thawed.is_set():
                    continue
                cell = await self._live()
                before = cell.deaths
                task = asyncio.create_task(run.run(cell))
                begun = asyncio.create_task(run.has_begun())
                both = asyncio.wait((task, begun), return_when=asyncio.FIRST_COMPLETED)
                try:
                    await _or_end(both, run, cell)
                finally:
                    begun.cancel()
                return cell, before, task

    async def _live(self) -> Cell:
        """The container of commands; a new one where there is none or what ran there ended it."""
        if self._cell is None or not self._cell.alive:
            await self._end_cell()
            await self._look()
            shown = (self._beside.artefacts,) if self._beside else ()
            self._cell = await Cell.start(
                self._line, f"{self._store.name}-{next(self._numbers)}",
                (*self._store.mounts(self._guards, self._standing), *shown),
                self._environment,
            )  # fmt: skip
        await self._ask("enter")
        return self._cell

    async def _end_cell(self) -> None:
        cell, self._cell = self._cell, None
        if cell is not None:
            self._memory_lost = True
            await cell.end()

    @contextlib.asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """End every process, and let none begin meanwhile; whoever waits for a command has its
        result.
        """
        for run in self._runs:
            run.kill()
        async with self._starting:
            await self._end_cell()
            self._thawed.set()
            yield

    async def freeze(self) -> None:
        """As the port says."""
        self._ensure_open()
        if not self._line.freezes:
            raise UsageError(
                f"{self._line.program} cannot freeze what runs in a container here.",
                'set sandbox.driver = "bubblewrap", or let the sandbox run on.',
            )
        self._thawed.clear()
        async with self._starting:
            for run in self._runs:
                run.freeze()
            if self._cell is not None and self._cell.alive:
                await self._cell.pause()

    async def thaw(self) -> None:
        """As the port says."""
        self._ensure_open()
        async with self._starting:
            if self._cell is not None:
                await self._cell.go_on()
        for run in self._runs:
            run.thaw()
        self._thawed.set()

    async def usage(self) -> Usage:
        """As the port says."""
        self._ensure_open()
        memory, processes = (0, 0) if self._cell is None else self._cell.use()
        size = (await self._ask("use")).head["bytes"]
        return Usage(memory_bytes=memory, processes=processes, disk_bytes=size)

    async def kill(self) -> None:
        """As the port says."""
        self._ensure_open()
        async with self._still():
            pass

    # --- files ------------------------------------------------------------------------------------

    async def _disk_full(self) -> bool:
        with contextlib.suppress(SandboxError):  # closed meanwhile
            return bool((await self._ask("use")).head["full"])
        return False

    def _is_guarded(self, path: str, *, hidden: bool) -> bool:
        parts = spec.workspace_parts(path)
        guards = self._guards["hidden"] if hidden else (*self._standing,)
        return any(self._standing[g] and parts[: len(g)] == g for g in guards)

    async def read(self, path: str, *, max_bytes: int) -> bytes | None:
        """As the port says; what is hidden from commands is hidden here."""
        try:
            hidden = self._is_guarded(path, hidden=True)
        except UsageError:
            return None
        return None if hidden else await super().read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """As the port says.

        Raises:
            UsageError: the path leaves the workspace. OSError: the disk is full or something is in
                the way: the policy's doing. SandboxError: the sandbox was lost.
        """
        self._ensure_open()
        if self._is_guarded(path, hidden=False):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        await self._ask("write", data, parts=spec.workspace_parts(path))

    # --- sealing and ending -----------------------------------------------------------------------

    async def seal(self) -> SealedStore:
        """As the port says; pipes and sockets are removed.

        Raises:
            SandboxError: the sandbox was lost or is closed.
        """
        self._ensure_open()
        sealed = SealedStore(self.name, self._store, self._leases)
        async with self._still():
            await sealed.seal()
        await self._leave_beside()
        return sealed

    async def snapshot(self) -> SealedStore:
        """As the port says; a copy is what is sealed.

        Raises:
            SandboxError: the sandbox was lost or is closed, or the copy could not be made.
        """
        self._ensure_open()
        async with self._still():
            disk = spec.Disk.of(self._environment)
            store = await Store.make(self._line, disk, over=self._store)
        sealed = SealedStore(self._leases.add(), store, self._leases)
        try:
            await sealed.seal()
        except BaseException:
            await sealed.close()
            raise
        return sealed

    async def close(self) -> None:
        """As the port says; what was sealed belongs to its `Sealed`."""
        state = self._leases.state(self.name)
        if state in (LeaseState.SEALED, LeaseState.CLOSED):
            return
        self._leases.move(self.name, LeaseState.CLOSED)
        await asyncio.shield(self._close_all())

    async def _close_all(self) -> None:
        try:
            async with self._still():
                pass
        finally:
            await self._leave_beside()
            await self._store.leave()

    async def _leave_beside(self) -> None:
        beside, self._beside = self._beside, None
        if beside is not None:
            await beside.leave()


async def _or_end(waited: Awaitable[_Result], run: Run, cell: Cell) -> _Result:
    """Wait; the command is ended where its caller is cancelled."""
    try:
        return await waited
    except asyncio.CancelledError:
        run.kill()
        cell.condemn()
        raise


def store_of(sealed: Sealed | None, line: CommandLine) -> Store | None:
    """The disk of a workspace that this source sealed.

    Raises:
        UsageError: it is of another source.
    """
    if sealed is None:
        return None
    if not isinstance(sealed, SealedStore) or sealed.store.line is not line:
        raise UsageError(f"wanted a workspace sealed by this source, got {sealed!r}.")
    return sealed.store
