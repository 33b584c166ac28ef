"""What the sources of all drivers share: the account of leases, the set-ups they keep, their life.

It makes no sandbox. What a set-up made is kept by what made it: a group's attempts share one, and
so do all groups of a task. The one thing that must stay true: two environments share only if their
files, their set-up and what limits them are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from typing import Protocol, Self
from weakref import WeakValueDictionary

from posttrain.core.containment import Capabilities, Sandbox, Sealed
from posttrain.core.errors import SandboxError
from posttrain.core.task import Environment
from posttrain.sandbox.leases import Leases, LeaseStats

MOST_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """One driver on this machine: what does the work, and what it can do."""

    capabilities: Capabilities
    path: str
    """The program that runs."""
    source: str
    """Where it is from, or what it runs containers with."""
    version: str
    sha256: str
    """Of the program."""
    uid: int | None
    """Host user that commands run as, never 0; None: one of the caller's subordinate users."""
    seccomp: bool


class Made(Sandbox, Protocol):
    """A sandbox of a driver, which is empty at first."""

    async def lay(self, *, strict: bool) -> None:
        """Lay the environment's files, where it does not begin over something that has them, and
        put up its guards, all of which are there where no policy was yet (`strict`).

        Raises:
            UsageError: a path is none. SandboxError: something is in the way, or is missing.
        """
        ...

    async def begin(self, argv: Sequence[str]) -> None:
        """Start a command that waits for its input, which the next `exec` brings it, if it is of
        the same words. One for which none comes finds its input closed. May do nothing.

        Raises:
            SandboxError: it was lost.
        """
        ...


class Source(ABC):
    """A source of sandboxes (`containment.Sandboxes`). Close it, or use it as a context manager."""

    kind = "a driver"
    """As messages call it."""

    def __init__(self) -> None:
        self._leases = Leases()
        self._prepared = Prepared()

    @abstractmethod
    async def abilities(self) -> Abilities:
        """What does the work here, and what it can do.

        Raises:
            IsolationError: this machine cannot contain anything so.
        """

    async def capabilities(self) -> Capabilities:
        """As the port says."""
        return (await self.abilities()).capabilities

    @abstractmethod
    async def _make(
        self,
        environment: Environment,
        *,
        beside: Sealed | None = None,
        over: Sealed | None = None,
        guarded: bool = True,
    ) -> Made:
        """A sandbox; it is not `guarded` while its set-up runs."""

    def lease(
        self,
        environment: Environment,
        *,
        beside: Sealed | None = None,
        over: Sealed | None = None,
        ahead: Sequence[str] = (),
    ) -> AbstractAsyncContextManager[Sandbox]:
        """As the port says; links inside `/artefacts` are not followed by anybody. What a set-up
        made is kept and serves all leases with the same files and set-up.

        Raises:
            IsolationError: more is required than this driver has, or it does not work here.
            UsageError: a file of the environment lies outside the workspace, or `beside` is of
                another source. SandboxError: it could not be made, or its set-up failed.
        """
        return self._lease(environment, beside, over, ahead)

    @contextlib.asynccontextmanager
    async def _lease(
        self,
        environment: Environment,
        beside: Sealed | None,
        over: Sealed | None,
        ahead: Sequence[str],
    ) -> AsyncIterator[Sandbox]:
        abilities = await self.abilities()
        driver = f"{self.kind} ({abilities.source})"
        abilities.capabilities.ensure(environment, driver=driver)
        base: AbstractAsyncContextManager[Sealed | None] = contextlib.nullcontext(over)
        if over is None and environment.setup:
            base = self._prepared.use(environment, lambda: self._prepare(environment))
        async with contextlib.AsyncExitStack() as stack:
            async with base as below:
                sandbox = await self._make(environment, beside=beside, over=below)
                stack.push_async_callback(sandbox.close)
                await sandbox.lay(strict=over is None)
                if ahead:
                    await sandbox.begin(ahead)
            yield sandbox

    async def _prepare(self, environment: Environment) -> Sealed:
        """What the environment's files and set-up make."""
        async with contextlib.AsyncExitStack() as stack:
            sandbox = await self._make(environment, guarded=False)
            try:
                await sandbox.lay(strict=True)
                await _set_up(sandbox, environment)
                sealed = await sandbox.seal()
                stack.push_async_callback(sealed.close)
            finally:
                await sandbox.close()
            stack.pop_all()
        return sealed

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
        """End it and what it keeps; idempotent. The source may be used again afterwards, but by
        none of its leases.
        """
        await self._prepared.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


# --- set-ups ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Kept:
    sealed: Sealed
    users: int = 0


class Prepared:
    """Sealed workspaces, the least recently used of which are let go; never one in use."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._kept)

    @contextlib.asynccontextmanager
    async def use(
        self, environment: Environment, make: Callable[[], Awaitable[Sealed]]
    ) -> AsyncIterator[Sealed]:
        """The kept one, or a new one; whoever asks meanwhile waits for the same."""
        key = key_of(environment)
        making = self._making.setdefault(key, asyncio.Lock())
        async with making:
            all_kept = self._kept
            if key not in all_kept:
                all_kept[key] = _Kept(await make())
        all_kept.move_to_end(key)
        kept = all_kept[key]
        kept.users += 1
        try:
            yield kept.sealed
        finally:
            kept.users -= 1
            if all_kept is self._kept:
                await self._let_go_old()
            elif not kept.users:  # All were let go meanwhile, before this one was made perhaps.
                await kept.sealed.close()

    async def _let_go_old(self) -> None:
        unused = [key for key, kept in self._kept.items() if not kept.users]
        for key in unused[: max(0, len(self._kept) - self._most)]:
            await self._kept.pop(key).sealed.close()

    async def clear(self) -> None:
        """Let all go, and keep nothing of what is being made. Whoever is cancelled here may be one
        of many requesters, so all are let go nevertheless.
        """
        kept, self._kept = self._kept, OrderedDict()
        await asyncio.shield(asyncio.gather(*(each.sealed.close() for each in kept.values())))


def key_of(environment: Environment) -> str:
    """Hash of everything that what a set-up makes may depend on."""
    files = {path: _hash(text) for path, text in environment.files.items()}
    text = json.dumps(asdict(replace(environment, files=files)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.lru_cache(maxsize=MOST_KEPT)
def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


async def _set_up(sandbox: Sandbox, environment: Environment) -> None:
    """Run the environment's set-up; a command of it that fails is an error."""
    for command in environment.setup:
        result = await sandbox.exec(("/bin/sh", "-c", command))
        if result.exit_code != 0:
            what = "ran out of time" if result.timed_out else f"gave {result.exit_code}"
            raise SandboxError(f"set-up {command!r} {what}: {result.stderr[-500:]}")
