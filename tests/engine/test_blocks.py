from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from posttrain.engine.blocks import BlockCopy, Blocks

SIZE = 4


def tokens(written: list[object]) -> list[int]:
    """What is written stands for its tokens."""
    return [hash(entry) for entry in written]


class Model(RuleBasedStateMachine):
    """Sequences that grow, fork and end, against a memory that is written for real."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Blocks(12, size=SIZE)
        self.memory = [[None] * SIZE for _ in range(12)]
        self.tables: dict[int, list[int]] = {}
        self.written: dict[int, list[object]] = {}
        self.names = 0
        self.ended: list[list[object]] = []

    @rule(count=st.integers(1, 9))
    def start(self, count: int) -> None:
        self.names += 1
        self.tables[self.names], self.written[self.names] = [], []
        if not self.grow(self.names, count):
            del self.tables[self.names], self.written[self.names]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 6))
    def extend(self, data: st.DataObject, count: int) -> None:
        self.grow(data.draw(st.sampled_from(sorted(self.tables))), count)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tables)))
        kept = data.draw(st.integers(0, len(self.written[name])))
        self.names += 1
        self.tables[self.names] = self.pool.fork(self.tables[name], tokens=kept)
        self.written[self.names] = self.written[name][:kept]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tables)))
        self.pool.remember("slot", tokens(self.written[name]), self.tables[name])

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        written = data.draw(st.sampled_from(self.ended))
        self.names += 1
        table = self.pool.adopt("slot", tokens(written))
        self.tables[self.names], self.written[self.names] = table, written[: len(table) * SIZE]

    @rule()
    def forget(self) -> None:
        self.pool.forget("slot")
        assert self.pool.stats().remembered == 0

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tables)))
        self.pool.release(self.tables.pop(name))
        self.ended.append(self.written.pop(name))

    def grow(self, name: int, count: int) -> bool:
        table, written = self.tables[name], self.written[name]
        first, last = len(written), len(written) + count
        cost, free = self.pool.cost(table, first=first, last=last), self.pool.free
        if cost > free:
            return False
        for copy in self.pool.extend(table, first=first, last=last):
            self.memory[copy.target] = list(self.memory[copy.source])
        assert self.pool.free == free - cost
        for position in range(first, last):
            written.append((name, position))
            self.memory[table[position // SIZE]][position % SIZE] = (name, position)
        return True

    @invariant()
    def everyone_reads_what_was_written_for_them(self) -> None:
        for name, table in self.tables.items():
            found = [
                self.memory[table[p // SIZE]][p % SIZE] for p in range(len(self.written[name]))
            ]
            assert found == self.written[name]

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check(self.tables.values())
        owners = Counter(block for table in self.tables.values() for block in table)
        assert self.pool.stats().shared == sum(count > 1 for count in owners.values())


TestBlocks = Model.TestCase


def test_a_shared_partial_block_is_copied_and_the_last_owner_writes_in_place():
    pool = Blocks(4, size=4)
    first: list[int] = []
    pool.extend(first, first=0, last=6)
    second = pool.fork(first, tokens=6)
    assert pool.extend(second, first=6, last=7) == [BlockCopy(first[1], second[1])]
    assert pool.extend(first, first=6, last=7) == []
