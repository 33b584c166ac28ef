from __future__ import annotations

import asyncio

import pytest

from posttrain.train.publish import Lineage, Publisher


class Sink:
    def __init__(self, *, fails=False) -> None:
        self.seen: list[Lineage] = []
        self.fails = fails

    async def publish(self, *, version: int, parent: int) -> None:
        if self.fails:
            raise RuntimeError("lost")
        self.seen.append(Lineage(version=version, parent=parent))


def test_versions_rise_and_name_their_parent():
    sinks = [Sink(), Sink()]
    publisher = Publisher(sinks)
    for _ in range(2):
        asyncio.run(publisher.publish())
    right = [Lineage(version=1, parent=0), Lineage(version=2, parent=1)]
    assert sinks[0].seen == sinks[1].seen == right


def test_after_a_rewind_numbers_go_on_rising_from_the_old_parent():
    sink = Sink()
    publisher = Publisher([sink], current=3, newest=7)
    assert asyncio.run(publisher.publish()) == Lineage(version=8, parent=3)
    assert publisher.current == 8


def test_a_sink_that_fails_leaves_the_current_version():
    publisher = Publisher([Sink(fails=True)])
    with pytest.raises(RuntimeError):
        asyncio.run(publisher.publish())
    assert publisher.current == 0
