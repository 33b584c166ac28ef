"""What set-ups made, kept by what made it.

A group's attempts share one set-up, and so do all groups of a task. The one thing that must stay
true: two environments share only if their files, their set-up and what limits them are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from weakref import WeakValueDictionary

from posttrain.core.containment import Sandbox, Sealed
from posttrain.core.errors import SandboxError
from posttrain.core.task import Environment

MOST_KEPT = 64


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
        """Let all go, and keep nothing of what is being made."""
        kept, self._kept = self._kept, OrderedDict()
        for each in kept.values():
            await each.sealed.close()


def key_of(environment: Environment) -> str:
    """Hash of everything that what a set-up makes may depend on."""
    text = json.dumps(asdict(environment), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


async def set_up(sandbox: Sandbox, environment: Environment) -> None:
    """Run the environment's set-up.

    Raises:
        SandboxError: a command of it failed.
    """
    for command in environment.setup:
        result = await sandbox.exec(("/bin/sh", "-c", command))
        if result.exit_code != 0:
            what = "ran out of time" if result.timed_out else f"gave {result.exit_code}"
            raise SandboxError(f"set-up {command!r} {what}: {result.stderr[-500:]}")
