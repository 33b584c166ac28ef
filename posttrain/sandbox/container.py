"""The second driver: sandboxes of containers, made by podman or docker.

For machines where bubblewrap cannot work and a container program can, and for tasks that require
its level; under gVisor (`runsc`) a kernel in user space answers what a policy runs. A lease costs
tenths of a second, a command one. Not for tasks that reach the network. The one thing that must
stay true: after `close` nothing of a lease is left, nor after the end of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

from posttrain.core.containment import Bound, Capabilities, Reach, Sandbox, Sealed, Snapshots
from posttrain.core.errors import SandboxError
from posttrain.core.task import Environment, Isolation
from posttrain.sandbox import command_line, spec, store
from posttrain.sandbox.cell import Cell
from posttrain.sandbox.command_line import CHOICES, Choice, CommandLine
from posttrain.sandbox.contained import ContainerSandbox, SealedStore, store_of
from posttrain.sandbox.leases import Leases, LeaseStats
from posttrain.sandbox.machine import Abilities
from posttrain.sandbox.prepared import Prepared, set_up
from posttrain.sandbox.store import Store


class ContainerSandboxes:
    """A source of sandboxes (`containment.Sandboxes`). Close it, or use it as a context manager."""

    def __init__(self, *, choices: Sequence[Choice] = CHOICES) -> None:
        """`choices` are tried in this order."""
        self._choices = choices
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._found: tuple[CommandLine, Abilities] | None = None
        self._finding = asyncio.Lock()
        self._leases = Leases()
        self._prepared = Prepared()

    async def capabilities(self) -> Capabilities:
        """As the port says."""
        return (await self.abilities()).capabilities

    async def abilities(self) -> Abilities:
        """What sandboxes here can do.

        Raises:
            IsolationError: no container can be started here.
        """
        return (await self._find())[1]

    async def _find(self) -> tuple[CommandLine, Abilities]:
        if self._found is not None:
            return self._found
        async with self._finding:
            if self._found is None:
                if self._folder is None:
                    self._folder = tempfile.TemporaryDirectory(prefix="posttrain-")
                    os.chmod(self._folder.name, 0o755)
                line = await command_line.find(self._folder.name, self._choices)
                await store.sweep(line)
                self._found = await _tried(line)
            return self._found

    def lease(
        self, environment: Environment, *, beside: Sealed | None = None, over: Sealed | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """As the port says. What a set-up made is kept and copied for all leases with the same
        files and set-up.

        Raises:
            IsolationError: a higher level or any network is required, or no container works here.
            UsageError: a file of the environment lies outside the workspace, or `beside` is of
                another source. SandboxError: it could not be made, or its set-up failed.
        """
        return self._lease(environment, beside, over)

    @contextlib.asynccontextmanager
    async def _lease(
        self, environment: Environment, beside: Sealed | None, over: Sealed | None
    ) -> AsyncIterator[Sandbox]:
        line, abilities = await self._find()
        abilities.capabilities.ensure(environment, driver=f"a container ({abilities.source})")
        strict = over is None
        base: AbstractAsyncContextManager[Sealed | None] = contextlib.nullcontext(over)
        if over is None and environment.setup:
            base = self._prepared.use(environment, lambda: self._prepare(environment, line))
        async with contextlib.AsyncExitStack() as stack:
            async with base as below:
                sandbox = await self._sandbox(line, environment, beside=beside, over=below)
                stack.push_async_callback(sandbox.close)
                await sandbox.lay(fresh=below is None, strict=strict)
            yield sandbox

    async def _sandbox(
        self,
        line: CommandLine,
        environment: Environment,
        *,
        beside: Sealed | None = None,
        over: Sealed | None = None,
        guarded: bool = True,
    ) -> ContainerSandbox:
        shown, lower = store_of(beside, line), store_of(over, line)
        for path in environment.files:
            spec.workspace_parts(path)
        spec.guards(environment)
        disk = await Store.make(line, spec.Disk.of(environment), over=lower)
        return ContainerSandbox(
            self._leases.add(), line, disk, self._leases, environment, beside=shown, guarded=guarded
        )

    async def _prepare(self, environment: Environment, line: CommandLine) -> SealedStore:
        """What the environment's files and set-up make."""
        sandbox = await self._sandbox(line, environment, guarded=False)
        try:
            await sandbox.lay(fresh=True, strict=True)
            await set_up(sandbox, environment)
            return await sandbox.seal()
        finally:
            await sandbox.close()

    def stats(self) -> LeaseStats:
        """Numbers of leases."""
        return self._leases.stats()

    @property
    def prepared(self) -> int:
        """How many set-ups are kept, each of them sealed."""
        return len(self._prepared)

    def check(self) -> None:
        """Invariants."""
        self._leases.check()

    async def close(self) -> None:
        """Let go of what set-ups made; idempotent. The source may be used again afterwards, but by
        none of its leases.
        """
        await self._prepared.clear()
        folder, self._folder, self._found = self._folder, None, None
        if folder is not None:
            folder.cleanup()

    async def __aenter__(self) -> ContainerSandboxes:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


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
