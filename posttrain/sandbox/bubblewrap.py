"""The default driver: sandboxes of namespaces, made by bubblewrap and kept by one holder.

A lease is a capped disk in the holder and, from its first command on, live namespaces over it that
bubblewrap made; commands enter them from outside, so no process inside serves the next one. Not for
hostile code with kernel exploits: the kernel is shared. The one thing that must stay true: whatever
happens inside, a call ends in its result or in `SandboxError`, and after `close` nothing of a lease
is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import posttrain
from posttrain.core.containment import Capabilities, Sandbox, Sealed
from posttrain.core.errors import IsolationError
from posttrain.core.task import Environment
from posttrain.sandbox import child, machine, spec, wire
from posttrain.sandbox.channel import Channel
from posttrain.sandbox.egress import Exchange
from posttrain.sandbox.leased import BubblewrapSandbox, SealedWorkspace
from posttrain.sandbox.leases import Leases, LeaseStats
from posttrain.sandbox.machine import ADVICE, Abilities, abilities_of
from posttrain.sandbox.prepared import Prepared, set_up


class BubblewrapSandboxes:
    """A source of sandboxes (`containment.Sandboxes`). Close it, or use it as a context manager."""

    def __init__(
        self, *, tell: Callable[[Exchange], None] = lambda exchange: None, share: bool = True
    ) -> None:
        """`tell` hears of every request that a task's commands made of the network. Without `share`
        snapshots are copied, as on machines whose kernel cannot share layers.
        """
        self._tell = tell
        self._share = share
        self._channel: Channel | None = None
        self._leases = Leases()
        self._prepared = Prepared()

    def lease(
        self, environment: Environment, *, beside: Sealed | None = None, over: Sealed | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """As the port says; links inside `/artefacts` are not followed by anybody. What a set-up
        made is kept and shared by all leases with the same files and set-up.

        Raises:
            IsolationError: a higher level is required, or this machine cannot contain anything.
            UsageError: a file of the environment lies outside the workspace, or `beside` is of
                another source. SandboxError: it could not be made, or its set-up failed.
        """
        return self._lease(environment, beside, over)

    @contextlib.asynccontextmanager
    async def _lease(
        self, environment: Environment, beside: Sealed | None, over: Sealed | None
    ) -> AsyncIterator[Sandbox]:
        (await self.capabilities()).ensure(environment, driver="bubblewrap")
        strict = over is None
        base: AbstractAsyncContextManager[Sealed | None] = contextlib.nullcontext(over)
        if over is None and environment.setup:
            base = self._prepared.use(environment, lambda: self._prepare(environment))
        async with contextlib.AsyncExitStack() as stack:
            async with base as below:
                sandbox = self._sandbox(await self._connect(), environment)
                stack.push_async_callback(sandbox.close)
                await sandbox.open(beside, below, strict=strict)
            yield sandbox

    def _sandbox(self, channel: Channel, environment: Environment) -> BubblewrapSandbox:
        name = self._leases.add()
        return BubblewrapSandbox(name, channel, self._leases, environment, tell=self._tell)

    async def _prepare(self, environment: Environment) -> SealedWorkspace:
        """What the environment's files and set-up make."""
        sandbox = self._sandbox(await self._connect(), environment)
        try:
            await sandbox.open(None, None, guarded=False)
            await set_up(sandbox, environment)
            return await sandbox.seal()
        finally:
            await sandbox.close()

    async def capabilities(self) -> Capabilities:
        """As the port says."""
        return (await self.abilities()).capabilities

    async def abilities(self) -> Abilities:
        """What sandboxes here can do.

        Raises:
            IsolationError: this machine cannot contain anything.
        """
        channel = await self._connect()
        return abilities_of((await _greeting(channel)).head)

    async def _connect(self) -> Channel:
        """The channel of a holder that greeted; a lost one is replaced, and its leases are lost."""
        if self._channel is not None and self._channel.lost:
            self._channel = None  # Before anybody else comes here during the next lines.
            self._leases.lose()
            await self._prepared.clear()
        if self._channel is None:
            self._channel = _start(share=self._share)
        channel = self._channel
        greeting = (await _greeting(channel)).head
        if "error" in greeting:
            channel.close()
            what, next_step = ADVICE[greeting["stage"]]
            raise IsolationError(f"{what} ({greeting['error']}).", next_step=next_step)
        return channel

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
        """End every sandbox and the holder; idempotent. The source may be used again afterwards."""
        await self._prepared.clear()
        channel, self._channel = self._channel, None
        if channel is not None:
            self._leases.lose()
            channel.close()
            await asyncio.shield(channel.closed())

    async def __aenter__(self) -> BubblewrapSandboxes:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


# --- starting ---------------------------------------------------------------------------------


def _start(*, share: bool) -> Channel:
    """A channel to a holder that has been told what it needs."""
    start = functools.partial(
        child.spawn,
        "posttrain.sandbox.keeper",
        options=("-I", "-S"),
        search=(str(Path(posttrain.__file__).parents[1]),),
        variables={},
    )
    channel = Channel(start, name="the holder of the sandboxes")
    order = {"candidates": machine.candidates(), "uid": spec.UNPRIVILEGED_ID, "share": share}
    channel.post(order)
    return channel


async def _greeting(channel: Channel) -> wire.Frame:
    """What the holder said first; every waiter may be cancelled without harm to the others."""
    return await asyncio.shield(asyncio.wrap_future(channel.greeting))
