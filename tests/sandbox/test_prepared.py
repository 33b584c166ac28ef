"""What set-ups made is let go whole, whoever is cancelled meanwhile."""

import asyncio

import pytest

from posttrain.core.task import Environment
from posttrain.sandbox.source import Prepared


class Slow:
    """Something sealed whose end waits to be allowed."""

    def __init__(self, allowed: asyncio.Event) -> None:
        self._allowed = allowed
        self.begun = asyncio.Event()
        self.closed = False

    async def close(self) -> None:
        self.begun.set()
        await self._allowed.wait()
        self.closed = True


def test_a_requester_that_is_cancelled_while_all_are_let_go_keeps_none() -> None:
    # Of four that were kept when their holder was lost, three stayed counted as lost for ever:
    # the requester that met the loss ran out of time while the first was let go.
    async def body() -> None:
        prepared, allowed = Prepared(), asyncio.Event()
        made = [Slow(allowed) for _ in range(4)]
        for number, each in enumerate(made):

            async def make(each: Slow = each) -> Slow:
                return each

            async with prepared.use(Environment(setup=(f"echo {number}",)), make):
                pass
        assert len(prepared) == 4
        clearing = asyncio.create_task(prepared.clear())
        await made[0].begun.wait()
        clearing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await clearing
        allowed.set()
        await asyncio.wait_for(asyncio.gather(*(each.begun.wait() for each in made)), 5)
        await asyncio.sleep(0)
        assert [each.closed for each in made] == [True] * 4
        assert len(prepared) == 0

    asyncio.run(body())
