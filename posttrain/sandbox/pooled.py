"""Sandboxes that are warm before they are asked for, over any source of them.

It carries out what `pool` decides: one task keeps one sandbox, from its lease of the source to the
end of that. A sandbox is warm when a command has run in it, or was started `ahead` in it. Files are
laid when it is handed out, so environments that differ in nothing else share their stock; those of
a command that is started ahead are there before it. What is leased `beside` or `over` something is
made when asked for and only takes its turn and its room. Who leaves one does not wait for its end,
until which it takes room. The one thing that must stay true: whoever is cancelled or fails, each
sandbox ends with its lease, and `close` leaves no task and none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.core.containment import Capabilities, Sandbox, Sandboxes, Sealed
from posttrain.core.errors import SandboxError
from posttrain.core.ports import Clock
from posttrain.core.task import Environment
from posttrain.sandbox import moves
from posttrain.sandbox.cgroups import memory_limit
from posttrain.sandbox.moves import End, Event, Forget, Hand, Instruction, Refuse, Start
from posttrain.sandbox.pool import Pool, PoolSettings, PoolStats
from posttrain.sandbox.source import key_of

_FIRST_COMMAND = ("true",)
_TYPICAL_BYTES = 64 << 20
"""What a sandbox uses, idle ones and the limits that few reach averaged."""


def room() -> int:
    """How many sandboxes fit half of the memory that this process may have."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):
        own, mounts = (Path(f"/proc/self/{name}").read_text() for name in ("cgroup", "mountinfo"))
        memory_bytes = min(memory_bytes, memory_limit(own, mounts) or memory_bytes)
    return max(8, memory_bytes // 2 // _TYPICAL_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """What a sandbox is made from."""

    environment: Environment
    beside: Sealed | None = None
    over: Sealed | None = None
    ahead: tuple[str, ...] = ()

    @property
    def alone(self) -> bool:
        return self.beside is not None or self.over is not None

    @property
    def key(self) -> str:
        return " ".join((key_of(self.environment), *self.ahead))

    def lease(self, source: Sandboxes) -> AbstractAsyncContextManager[Sandbox]:
        return source.lease(self.environment, beside=self.beside, over=self.over, ahead=self.ahead)


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept:
    """A sandbox of the source and the task that keeps it."""

    task: asyncio.Task[None]
    sandbox: Sandbox | None = None
    """None until it is warm."""


class PooledSandboxes:
    """A source of sandboxes (`containment.Sandboxes`) over another one, which it does not close. It
    belongs to the event loop it is first used in.
    """

    def __init__(
        self, source: Sandboxes, clock: Clock, settings: PoolSettings | None = None
    ) -> None:
        self._source = source
        self._clock = clock
        self._pool = Pool(settings)
        self._numbers = itertools.count(1)
        self._recipes: dict[str, _Recipe] = {}
        self._answers: dict[int, asyncio.Future[_Kept | BaseException]] = {}
        self._kept: dict[int, _Kept] = {}
        self._timer: asyncio.Task[None] | None = None
        self._timer_s = 0.0

    async def capabilities(self) -> Capabilities:
        """As the source has them."""
        return await self._source.capabilities()

    def lease(
        self,
        environment: Environment,
        *,
        beside: Sealed | None = None,
        over: Sealed | None = None,
        ahead: Sequence[str] = (),
    ) -> AbstractAsyncContextManager[Sandbox]:
        """As the port says; waits for its turn where there is no room. Who holds one and waits for
        another may wait for ever, when all do.

        Raises:
            Whatever the source raises. SandboxError: the pool is closed.
        """
        recipe = _Recipe(environment=environment, beside=beside, over=over, ahead=tuple(ahead))
        stands = environment.setup or environment.read_only or environment.hidden
        if recipe.alone or recipe.ahead or stands:
            return self._lease(recipe, {})
        plain = replace(environment, files={})
        return self._lease(_Recipe(environment=plain), environment.files)

    @contextlib.asynccontextmanager
    async def _lease(self, recipe: _Recipe, files: Mapping[str, str]) -> AsyncIterator[Sandbox]:
        requester, kept = next(self._numbers), None
        key = f"alone {requester}" if recipe.alone else recipe.key
        self._recipes[key] = recipe
        try:
            kept = await self._obtain(moves.Ask(requester=requester, key=key, alone=recipe.alone))
            assert kept.sandbox is not None, "what is handed out is warm"
            await _lay(kept.sandbox, files)
            yield kept.sandbox
        finally:
            del self._answers[requester]
            self._tell(moves.Left(requester=requester))
            if kept is not None and recipe.alone:
                await asyncio.wait((kept.task,))

    async def _obtain(self, ask: moves.Ask) -> _Kept:
        """A sandbox that answers, when it is this requester's turn."""
        event: Event = ask
        while True:
            answer: asyncio.Future[_Kept | BaseException]
            answer = self._answers[ask.requester] = asyncio.get_running_loop().create_future()
            self._tell(event)
            found = await answer
            if isinstance(found, BaseException):
                raise found
            if await _is_alive(found):
                return found
            event = moves.Dead(requester=ask.requester)

    # --- carrying out -----------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        for instruction in self._pool.handle(event, now_s=self._clock.now_s()):
            self._carry_out(instruction)
        due_s = self._pool.due_s
        armed = self._timer is not None and not self._timer.done()
        if due_s is not None and not (armed and self._timer_s <= due_s):
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_s = asyncio.create_task(self._tick(due_s)), due_s

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Start(sandbox=number, key=key):
                task = asyncio.create_task(self._keep(number, self._recipes[key]))
                self._kept[number] = _Kept(task=task)
                task.add_done_callback(functools.partial(self._gone, number))
            case Hand(sandbox=number, requester=requester):
                self._answer(requester, self._kept[number])
            case End(sandbox=number):
                self._kept[number].task.cancel()
            case Refuse(requester=requester, sandbox=None):
                self._answer(requester, SandboxError("the pool of sandboxes is closed."))
            case Refuse(requester=requester, sandbox=int() as number):
                self._answer(requester, _failure(self._kept[number].task))
            case Forget(key=key):
                del self._recipes[key]

    def _answer(self, requester: int, found: _Kept | BaseException) -> None:
        """One whose requester was cancelled this moment comes back with its `Left`."""
        answer = self._answers[requester]
        if not answer.done():
            answer.set_result(found)

    async def _keep(self, number: int, recipe: _Recipe) -> None:
        """Make a sandbox, warm it, and hold it until this is cancelled."""
        async with recipe.lease(self._source) as sandbox:
            if not recipe.alone and not recipe.ahead:
                await sandbox.exec(_FIRST_COMMAND)
            self._kept[number].sandbox = sandbox
            self._tell(moves.Ready(sandbox=number))
            await asyncio.get_running_loop().create_future()

    def _gone(self, number: int, task: asyncio.Task[None]) -> None:
        failed = not task.cancelled() and task.exception() is not None
        self._tell(moves.Gone(sandbox=number, failed=failed))
        del self._kept[number]

    async def _tick(self, due_s: float) -> None:
        await self._clock.sleep(due_s - self._clock.now_s())
        self._timer = None
        self._tell(moves.Tick())

    # --- looking and ending -----------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """Numbers of the pool."""
        return self._pool.stats()

    def check(self) -> None:
        """Invariants."""
        self._pool.check()
        stats = self._pool.stats()
        assert len(self._kept) == stats.alive, f"{len(self._kept)} are kept: {stats}"
        assert len(self._recipes) == stats.keys, f"{len(self._recipes)} recipes: {stats}"
        assert len(self._answers) >= stats.waiting + stats.leased, "a requester was lost"

    async def close(self) -> None:
        """End every sandbox, those that are leased too, and wait until they have ended. Idempotent;
        who waits or asks afterwards is refused.
        """
        self._tell(moves.Close())
        while self._kept:
            await asyncio.wait([kept.task for kept in self._kept.values()])
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.wait((self._timer,))

    async def __aenter__(self) -> PooledSandboxes:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


async def _is_alive(kept: _Kept) -> bool:
    """Whether what makes the sandbox still answers for it."""
    assert kept.sandbox is not None, "what is handed out is warm"
    try:
        await kept.sandbox.usage()
    except (SandboxError, OSError):
        return False
    return True


async def _lay(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        try:
            await sandbox.write(path, text.encode("utf-8", "replace"))
        except OSError as error:
            raise SandboxError(f"a sandbox could not be laid out: {path}: {error}") from error


def _failure(task: asyncio.Task[None]) -> BaseException:
    """Why a task ended before its sandbox was warm."""
    if task.cancelled():
        return SandboxError("a sandbox was cancelled while it was made.")
    return task.exception() or SandboxError("a sandbox was closed while it was made.")
