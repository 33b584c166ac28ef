"""Accounting of key-value blocks: reference counts, sharing, copy on write.

A block holds the keys and values of `size` consecutive positions of one or more sequences. A
table is the list of block ids of one sequence; tables belong to their owners, the pool only counts
references. It moves no data: `extend` says which blocks the driver must copy. The one thing that
must stay true: a block that is written to has exactly one owner.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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

    @property
    def free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

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
        for block in table:
            self._owners[block] -= 1
            assert self._owners[block] >= 0, f"block {block} released twice"
            if not self._owners[block]:
                heapq.heappush(self._free, block)
        table.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Recount every reference from all tables there are."""
        counted = Counter(block for table in tables for block in table)
        for block, owners in enumerate(self._owners):
            assert counted[block] == owners, (
                f"block {block}: {owners} owners recorded, {counted[block]} found"
            )
        assert sorted(self._free) == [b for b in range(self.total) if not self._owners[b]]

    def stats(self) -> BlockStats:
        """Current numbers."""
        shared = sum(owners > 1 for owners in self._owners)
        return BlockStats(total=self.total, free=self.free, shared=shared)

    def _old(self, table: Sequence[int], first: int, last: int) -> range:
        """Indexes of existing blocks that hold some of the positions."""
        return range(first // self.size, min(self.count(last), len(table)))

    def _take(self) -> int:
        block = heapq.heappop(self._free)
        self._owners[block] = 1
        return block
