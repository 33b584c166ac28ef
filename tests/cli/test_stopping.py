"""Ctrl-C: a signal waits for its place; a run is asked to end, and cancelled where that is vain."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.cli import stopping, train


def press() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


async def turns(count: int = 5) -> None:
    """Let the event loop hear what has come."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_signal_waits_until_what_is_being_closed_is_closed() -> None:
    """It came in the middle of opening or closing, and left a traceback."""
    doors: list[str] = []

    def work() -> None:
        with stopping.held():
            press()
            doors.append("closed")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert doors == ["closed"]


def test_signals_are_heard_by_the_loop_one_after_another() -> None:
    heard: list[str] = []

    async def body() -> None:
        with stopping.heard(lambda: heard.append("now")):
            press()
            await turns()
            signal.raise_signal(signal.SIGTERM)
            await turns()
        press()
        heard.append("closed")

    with pytest.raises(KeyboardInterrupt), stopping.held():
        asyncio.run(body())
    assert heard == ["now", "now", "closed"]


class AskedRun:
    """A run that presses Ctrl-C so many times; `begun` tells whether it can be asked."""

    def __init__(self, presses: int, *, begun: bool) -> None:
        self.presses = presses
        self.begun = begun
        self.asked = 0

    def interrupt(self) -> bool:
        self.asked += self.begun
        return self.begun

    async def train(self) -> Any:
        for _ in range(self.presses):
            press()
            await turns()
        return SimpleNamespace(reason="done")


def trained(run: AskedRun, before: Callable[[], None] = lambda: None) -> tuple[Any, list[str]]:
    """What came of it, and what was opened and closed."""
    doors: list[str] = []

    @asynccontextmanager
    async def opening() -> AsyncIterator[AskedRun]:
        doors.append("opened")
        try:
            before()
            await turns()
            yield run
        finally:
            doors.append("closed")

    manager: AbstractAsyncContextManager[Any] = opening()
    try:
        with stopping.held():
            return asyncio.run(train._train(manager)).reason, doors
    except asyncio.CancelledError:
        return "cancelled", doors


@pytest.mark.parametrize("presses", [1, 2])
def test_a_run_under_way_is_asked_to_end(presses: int) -> None:
    run = AskedRun(presses, begun=True)
    assert trained(run) == ("done", ["opened", "closed"])
    assert run.asked == presses


def test_a_run_that_does_not_end_though_asked_twice_is_cancelled() -> None:
    run = AskedRun(3, begun=True)
    assert trained(run) == ("cancelled", ["opened", "closed"])
    assert run.asked == 2


def test_a_run_that_has_not_begun_ends_at_the_first_signal() -> None:
    """While its anchor was made, Ctrl-C did nothing, however often."""
    assert trained(AskedRun(1, begun=False)) == ("cancelled", ["opened", "closed"])
    assert trained(AskedRun(0, begun=True), before=press) == ("cancelled", ["opened", "closed"])
