"""The second driver: sandboxes of containers, made by podman or docker.

For machines where bubblewrap cannot work and a container program can, and for tasks that require
its level; under gVisor (`runsc`) a kernel in user space answers what a policy runs. A lease costs
tenths of a second, a command one. Not for tasks that reach the network. The one thing that must
stay true: after `close` nothing of a lease is left, nor after the end of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.core.containment import (
    Bound,
    Capabilities,
    ExecResult,
    Reach,
    Sealed,
    Snapshots,
    Usage,
)
from posttrain.core.errors import SandboxError, UsageError
from posttrain.core.task import Environment, Isolation
from posttrain.sandbox import command_line, spec, store, usher
from posttrain.sandbox.cell import Cell
from posttrain.sandbox.command import Run
from posttrain.sandbox.command_line import CHOICES, Choice, CommandLine
from posttrain.sandbox.leases import Leased, Leases, LeaseState
from posttrain.sandbox.source import Abilities, Source
from posttrain.sandbox.spec import process_limits
from posttrain.sandbox.store import SealedStore, Store
from posttrain.sandbox.usher import Command

_MOST_TRIES = 3
"""Of starting a command: it may meet a container that what runs there has ended this moment."""


class ContainerSandboxes(Source):
    """The source of this driver's sandboxes."""

    kind = "a container"

    def __init__(self, *, choices: Sequence[Choice] = CHOICES) -> None:
        """`choices` are tried in this order."""
        super().__init__()
        self._choices = choices
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._found: tuple[CommandLine, Abilities] | None = None
        self._finding = asyncio.Lock()

    async def abilities(self) -> Abilities:
        """As `Source.abilities`."""
        return (await self._find())[1]

    async def _find(self) -> tuple[CommandLine, Abilities]:
        async with self._finding:
            if self._found is None:
                if self._folder is None:
                    self._folder = tempfile.TemporaryDirectory(prefix="posttrain-")
                    os.chmod(self._folder.name, 0o755)
                line = await command_line.find(self._folder.name, self._choices)
                await store.sweep(line)
                self._found = await _tried(line)
            return self._found

    async def _make(
        self,
        environment: Environment,
        *,
        beside: Sealed | None = None,
        over: Sealed | None = None,
        guarded: bool = True,
    ) -> ContainerSandbox:
        line, _ = await self._find()
        shown, lower = store.store_of(beside, line), store.store_of(over, line)
        for path in environment.files:
            spec.workspace_parts(path)
        guards = spec.Guards.of(environment)
        disk = await Store.make(line, spec.Disk.of(environment), over=lower)
        return ContainerSandbox(
            disk, self._leases, environment,
            guards=guards if guarded else spec.Guards(), beside=shown, fresh=over is None,
        )  # fmt: skip

    async def close(self) -> None:
        """As `Source.close`."""
        await super().close()
        folder, self._folder, self._found = self._folder, None, None
        if folder is not None:
            folder.cleanup()


async def _tried(line: CommandLine) -> tuple[CommandLine, Abilities]:
    """What a container that runs shows of what it can do."""
    name = f"posttrain-trial-{os.urandom(8).hex()}"
    cell = await Cell.start(line, name, (), Environment())
    try:
        freezes = False
        with contextlib.suppress(SandboxError):
            await cell.pause()
            await cell.go_on()
            freezes = True
    finally:
        await cell.end()
    capabilities = Capabilities(
        isolation=Isolation.USER_KERNEL if line.is_gvisor else Isolation.CONTAINER,
        limits=Bound.TREE if cell.place else Bound.PROCESS,
        snapshots=Snapshots.COPIES,
        reach=frozenset({Reach.NOTHING}),
        cores=cell.place is not None and cell.place.cpu is not None,
        freezes=freezes,
    )
    program = "podman" if line.podman else "docker"
    outside = line.maps if line.podman else not line.private
    return replace(line, freezes=freezes), Abilities(
        capabilities=capabilities,
        path=line.program,
        source=f"{program} with {line.runtime or 'its own runtime'}",
        version=line.version,
        sha256=hashlib.sha256(Path(line.program).read_bytes()).hexdigest(),
        uid=spec.UNPRIVILEGED_ID if outside else None,
        seccomp=bool(line.profile),
    )


class ContainerSandbox(Leased):
    """One lease (`containment.Sandbox`)."""

    def __init__(
        self,
        disk: Store,
        leases: Leases,
        environment: Environment,
        *,
        guards: spec.Guards,
        beside: Store | None,
        fresh: bool,
    ) -> None:
        """The files of the environment are laid on a disk that is `fresh`."""
        super().__init__(disk.channel, leases, environment)
        self._line = disk.line
        self._store = disk
        self._beside = beside.use() if beside else None
        self._guards = guards
        self._fresh = fresh
        self._standing = dict[tuple[str, ...], str]()
        self._cell: Cell | None = None
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()
        self._runs = set[Run]()
        self._memory_lost = False
        """Whether processes of commands have ended, which no command's result has told yet."""

    async def lay(self, *, strict: bool) -> None:
        """As `source.Made`."""
        store.ensure_mountable(self._guards)
        self._memory_lost = not strict
        try:
            for path, text in self._environment.files.items() if self._fresh else ():
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
        paths = [*self._guards.read_only, *self._guards.hidden]
        kinds = (await self._ask("kinds", paths=paths)).head["kinds"] if paths else []
        self._standing = dict(zip(paths, kinds, strict=True))

    # --- commands ---------------------------------------------------------------------------------

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        listen: Callable[[str, bytes], None] | None = None,
    ) -> ExecResult:
        """As the port says; the way into the container is not counted as the command's time."""
        limit_s = self._limit_s(argv, timeout_s)
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
            self._runs.add(run)  # It can be ended from now on, also while it waits to begin.
            try:
                started = await self._start(run)
                if started is None:
                    return ExecResult(exit_code=None, stdout="", stderr="")
                cell, before, task = started
                lost, self._memory_lost = lost or self._memory_lost, False
                with _ended_with_its_caller(run, cell):
                    result = await asyncio.shield(task)
            finally:
                self._runs.discard(run)
            killed, full = cell.perished or cell.deaths > before, await self._disk_full()
            if run.begun or result.exit_code is None or cell.deaths > before:
                return replace(result, out_of_memory=killed, disk_full=full, memory_lost=lost)
            if cell.alive and self._thawed.is_set():
                if (cell.use()[1] or 0) >= self._environment.max_processes:
                    return replace(result, exit_code=usher.NOT_EXECUTABLE, disk_full=full)
                break
        raise SandboxError(f"a command could not be started: {result.stderr[-400:]}")

    async def _start(self, run: Run) -> tuple[Cell, int, asyncio.Task[ExecResult]] | None:
        """Start a command, one at a time, when nothing is frozen: a container that is frozen on
        somebody's way in may hang. Where, how many it had killed, and what will be the result.
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
                try:
                    with _ended_with_its_caller(run, cell):
                        await asyncio.wait((task, begun), return_when=asyncio.FIRST_COMPLETED)
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
        guards = self._guards.hidden if hidden else (*self._standing,)
        return any(self._standing[g] and parts[: len(g)] == g for g in guards)

    async def read(self, path: str, *, max_bytes: int) -> bytes | None:
        """As the port says; what is hidden from commands is hidden here."""
        try:
            hidden = self._is_guarded(path, hidden=True)
        except UsageError:
            return None
        return None if hidden else await super().read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """As the port says."""
        self._ensure_open()
        if self._is_guarded(path, hidden=False):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        await super().write(path, data)

    # --- sealing and ending -----------------------------------------------------------------------

    async def seal(self) -> SealedStore:
        """As the port says; pipes and sockets are removed."""
        self._ensure_open()
        sealed = SealedStore(self.name, self._store, self._leases)
        async with self._still():
            await self._leave_beside()  # first, since whoever is cancelled in it has no seal yet
            await sealed.seal()
        return sealed

    async def snapshot(self) -> SealedStore:
        """As the port says; a copy is what is sealed."""
        self._ensure_open()
        async with self._still():
            disk = spec.Disk.of(self._environment)
            copy = await Store.make(self._line, disk, over=self._store)
        sealed = SealedStore(self._leases.add(), copy, self._leases)
        try:
            await sealed.seal()
        except BaseException:
            await sealed.close()
            raise
        return sealed

    async def close(self) -> None:
        """As the port says; what was sealed belongs to its `Sealed`."""
        if self._leases.state(self.name) not in (LeaseState.SEALED, LeaseState.CLOSED):
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


@contextlib.contextmanager
def _ended_with_its_caller(run: Run, cell: Cell) -> Iterator[None]:
    try:
        yield
    except asyncio.CancelledError:
        run.kill()
        cell.condemn()
        raise
