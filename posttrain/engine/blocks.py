"""Accounting of key-value blocks: reference counts, sharing, copy on write, finding again.

A block holds the keys and values of `size` consecutive positions of one or more sequences. A
table is the list of block ids of one sequence; tables belong to their owners, the pool only counts
references. A full block is remembered by what it holds, a sequence from its beginning to the
block's end, and keeps it after its last owner has left until the room is needed. It moves no data:
`extend` says which blocks the driver must copy. The one thing that must stay true: a block that is
written to has exactly one owner and is not remembered.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The driver must copy all of `source` to `target` before it writes to `target`."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStats:
    """Numbers of blocks."""

    total: int
    free: int
    shared: int
    """Blocks with more than one owner."""
    remembered: int
    """Blocks that a sequence with the same beginning would find again."""


_Key = tuple[str | int, tuple[int, ...]]
"""What a block holds: what comes before (a slot, or the number of the block in front), its tokens.
"""


class _Found(NamedTuple):
    """A remembered block."""

    block: int
    number: int
    """Of this content; never used again, so that what followed a forgotten block is not found."""


class Blocks:
    """A pool of blocks.

    >>> pool = Blocks(4, size=16)
    >>> leader: list[int] = []
    >>> pool.extend(leader, first=0, last=20)
    []
    >>> follower = pool.fork(leader, tokens=20)
    >>> pool.extend(follower, first=20, last=21)   # the partial block was shared
    [BlockCopy(source=1, target=2)]
    """

    def __init__(self, total: int, *, size: int) -> None:
        assert total > 0, "a pool without blocks"
        assert size > 0, "blocks without room"
        self.total, self.size = total, size
        self._owners = [0] * total
        self._free = list(range(total))  # a heap: low ids first keeps what is in use close together
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Remembered blocks nobody owns; the first is taken next."""
        self._known: dict[_Key, _Found] = {}
        self._keys: dict[int, tuple[str, _Key]] = {}
        """Remembered block → its slot, and what it is known by."""
        self._numbers = itertools.count()

    @property
    def free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free) + len(self._idle)

    def count(self, tokens: int) -> int:
        """Blocks that many tokens fill."""
        return -(-tokens // self.size)

    def cost(self, table: Sequence[int], *, first: int, last: int) -> int:
        """Free blocks that `extend` with the same arguments takes."""
        grown = max(0, self.count(last) - len(table))
        return grown + sum(
            self._owners[table[index]] > 1 for index in self._old(table, first, last)
        )

    def extend(self, table: list[int], *, first: int, last: int) -> list[BlockCopy]:
        """Make positions `first` … `last`-1 of a sequence writable: the table grows, and shared
        blocks among them are replaced by own ones. The caller has made sure of `cost` free blocks.
        """
        copies = []
        for index in self._old(table, first, last):
            if self._owners[table[index]] > 1:
                copies.append(BlockCopy(table[index], self._take()))
                self._owners[table[index]] -= 1
                table[index] = copies[-1].target
            elif table[index] in self._keys:
                self._forget(table[index])
        table.extend(self._take() for _ in range(self.count(last) - len(table)))
        return copies

    def fork(self, table: Sequence[int], *, tokens: int) -> list[int]:
        """A second table over the blocks of the first `tokens` tokens."""
        shared = list(table[: self.count(tokens)])
        for block in shared:
            self._owners[block] += 1
        return shared

    def release(self, table: list[int]) -> None:
        """Give up a table; it is empty afterwards."""
        for block in reversed(table):  # so that beginnings are kept the longest
            self._owners[block] -= 1
            assert self._owners[block] >= 0, f"block {block} released twice"
            if not self._owners[block]:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    heapq.heappush(self._free, block)
        table.clear()

    def remember(self, slot: str, tokens: Sequence[int], table: Sequence[int]) -> None:
        """The full blocks among those of `tokens`, a sequence's beginning, hold or will hold its
        keys and values under the slot's present weights before anybody else's step reads them.
        """
        place: str | int = slot
        for index, part in enumerate(self._parts(tokens)):
            key, block = (place, part), table[index]
            if key not in self._known:
                if block in self._keys:  # known by what followed a block that was forgotten
                    self._forget(block)
                self._known[key] = _Found(block, next(self._numbers))
                self._keys[block] = (slot, key)
            place = self._known[key].number

    def adopt(self, slot: str, tokens: Sequence[int]) -> list[int]:
        """A table of the remembered blocks that hold the longest beginning of `tokens`."""
        table: list[int] = []
        place: str | int = slot
        for part in self._parts(tokens):
            found = self._known.get((place, part))
            if found is None:
                break
            place = found.number
            table.append(found.block)
            self._owners[found.block] += 1
            self._idle.pop(found.block, None)
        return table

    def forget(self, slot: str) -> None:
        """What blocks hold for a slot is not to be found again."""
        for block in [block for block, (of, _) in self._keys.items() if of == slot]:
            self._forget(block)
            if block in self._idle:
                del self._idle[block]
                heapq.heappush(self._free, block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Recount every reference from all tables there are."""
        counted = Counter(block for table in tables for block in table)
        for block, owners in enumerate(self._owners):
            assert counted[block] == owners, (
                f"block {block}: {owners} owners recorded, {counted[block]} found"
            )
        nobodys = [b for b in range(self.total) if not self._owners[b]]
        assert sorted((*self._free, *self._idle)) == nobodys
        assert self._idle.keys() <= self._keys.keys()
        assert {found.block: key for key, found in self._known.items()} == {
            block: key for block, (_, key) in self._keys.items()
        }

    def stats(self) -> BlockStats:
        """Current numbers."""
        shared = sum(owners > 1 for owners in self._owners)
        return BlockStats(
            total=self.total, free=self.free, shared=shared, remembered=len(self._keys)
        )

    def _parts(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Tokens of full blocks."""
        for first in range(0, len(tokens) - self.size + 1, self.size):
            yield tuple(tokens[first : first + self.size])

    def _forget(self, block: int) -> None:
        _, key = self._keys.pop(block)
        del self._known[key]

    def _old(self, table: Sequence[int], first: int, last: int) -> range:
        """Indexes of existing blocks that hold some of the positions."""
        return range(first // self.size, min(self.count(last), len(table)))

    def _take(self) -> int:
        if self._free:
            block = heapq.heappop(self._free)
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._owners[block] = 1
        return block
