"""What set-ups made, kept by what made it.

A group's attempts share one set-up, and so do all groups of a task. The one thing that must stay
true: two environments share only if their files, their set-up and what limits them are the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from posttrain.core.containment import Sealed
from posttrain.core.task import Environment

MOST_KEPT = 64


class Prepared:
    """Sealed workspaces, the least recently used of which are let go."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[str, Sealed] = OrderedDict()
        self._making: dict[str, asyncio.Lock] = {}

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, environment: Environment, make: Callable[[], Awaitable[Sealed]]) -> Sealed:
        """The kept one, or a new one; whoever asks meanwhile waits for the same."""
        key = key_of(environment)
        async with self._making.setdefault(key, asyncio.Lock()):
            try:
                if key not in self._kept:
                    self._kept[key] = await make()
                self._kept.move_to_end(key)
                found = self._kept[key]
            finally:
                self._making.pop(key, None)
        while len(self._kept) > self._most:
            _, oldest = self._kept.popitem(last=False)
            await oldest.close()
        return found

    async def clear(self) -> None:
        """Let all go."""
        kept, self._kept = self._kept, OrderedDict()
        for sealed in kept.values():
            await sealed.close()


def key_of(environment: Environment) -> str:
    """Hash of everything that what a set-up makes may depend on."""
    text = json.dumps(asdict(environment), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
