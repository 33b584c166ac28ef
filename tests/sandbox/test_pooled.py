import asyncio
import contextlib
import functools
import gc
import os
import random
from collections.abc import AsyncIterator

import pytest

from posttrain.core.clock import ManualClock
from posttrain.core.containment import ExecResult
from posttrain.core.errors import IsolationError, SandboxError, UsageError
from posttrain.core.task import Environment, Isolation
from posttrain.sandbox import pooled
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.moves import PAUSE_S
from posttrain.sandbox.pool import PoolSettings
from posttrain.sandbox.pooled import PooledSandboxes, room
from posttrain.sandbox.scripted import ScriptedSandboxes, answers

OK = ExecResult(exit_code=0, stdout="", stderr="")


class Watched:
    """A scripted source that remembers what it made and makes nothing while it is shut."""

    def __init__(self, **arguments) -> None:
        self.scripted = ScriptedSandboxes(
            answers({"true": OK, "make": OK, "look": OK}), **arguments
        )
        self.asked, self.made, self.ahead = [], [], []
        self.open, self.may_end = asyncio.Event(), asyncio.Event()
        self.open.set()
        self.may_end.set()
        self.end_failure = None
        self.on_made = lambda: None
        self.capabilities = self.scripted.capabilities

    @contextlib.asynccontextmanager
    async def lease(self, environment, *, beside=None, over=None, ahead=()) -> AsyncIterator:
        self.asked.append(environment)
        self.ahead += [ahead] if ahead else []
        async with self.scripted.lease(environment, beside=beside, over=over) as sandbox:
            await self.open.wait()
            self.made.append(sandbox)
            self.on_made()
            try:
                yield sandbox
            finally:
                await self.may_end.wait()
                if self.end_failure is not None:
                    raise self.end_failure

    @property
    def lines(self) -> list[str]:
        return [command.line for command in self.scripted.executed]

    @property
    def alive(self) -> int:
        return self.scripted.stats().open


class Scene:
    """A pool over a watched source, with a clock that stands still."""

    def __init__(self, source: Watched, **bounds) -> None:
        self.source = source
        self.clock = ManualClock()
        self.pool = PooledSandboxes(source, self.clock, PoolSettings(**bounds))

    async def visit(self, environment: Environment | None = None, **given) -> str:
        """Lease, run a command, leave; returns the sandbox's name."""
        async with self.pool.lease(environment or Environment(), **given) as sandbox:
            self.pool.check()
            await sandbox.exec(("look",))
            return sandbox.name

    async def stock(self, environment: Environment | None = None) -> None:
        """Have one kept warm: it was asked for twice."""
        for _ in range(2):
            await self.visit(environment)
            self.clock.advance(1)
        await turns()
        assert self.pool.stats().idle == 1


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(30):
        await asyncio.sleep(0)


def play(body, **arguments) -> None:
    """Run a body with a scene; afterwards nothing is left of it."""
    bounds = {name: arguments.pop(name) for name in PoolSettings.__slots__ if name in arguments}

    unseen: list[object] = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, story: unseen.append(story))
        scene = Scene(Watched(**arguments), **bounds)
        async with scene.pool:
            await body(scene)
            scene.pool.check()
        scene.pool.check()
        stats = scene.pool.stats()
        assert (stats.alive, stats.waiting, stats.keys) == (0, 0, 0)
        assert scene.source.alive == 0
        scene.source.scripted.check()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        del scene
        gc.collect()
        assert unseen == []

    asyncio.run(main())


# --- warm and fresh ---------------------------------------------------------------------------


def test_one_that_is_asked_for_again_is_warm_before_and_every_lease_is_a_fresh_one():
    async def body(scene):
        first = await scene.visit()
        assert scene.source.lines == ["true", "look"]
        scene.clock.advance(1)
        second = await scene.visit()
        scene.clock.advance(PAUSE_S)
        await turns()
        assert scene.source.lines.count("true") == 3  # one is warm for whoever comes next
        third = await scene.visit()
        assert scene.pool.stats().found_warm == 1
        assert len({first, second, third}) == 3
        assert scene.source.alive == scene.pool.stats().alive

    play(body)


def test_environments_that_differ_in_files_only_share_what_is_warm_and_never_the_files():
    async def body(scene):
        await scene.stock(Environment(files={"a.txt": "one"}))
        async with scene.pool.lease(Environment(files={"b/b.txt": "two\ud800"})) as sandbox:
            assert scene.pool.stats().found_warm == 1
            assert sandbox.files == {"b/b.txt": b"two?"}

    play(body)


@pytest.mark.parametrize(
    "environment",
    [
        Environment(setup=("make",)),
        Environment(memory_bytes=1 << 20),
        Environment(read_only=("a.txt",), files={"a.txt": ""}),
        Environment(hidden=("a.txt",), files={"a.txt": ""}),
    ],
    ids=("set-up", "bounds", "read-only", "hidden"),
)
def test_environments_that_differ_in_more_do_not_share(environment):
    async def body(scene):
        await scene.stock()
        async with scene.pool.lease(environment) as sandbox:
            assert scene.pool.stats().found_warm == 0
            assert sandbox.files == {path: b"" for path in environment.files}
            assert scene.source.asked[-1] == environment  # files before what stands on them
        assert scene.source.lines.count("make") == len(environment.setup)

    play(body)


def test_what_goes_on_from_something_sealed_or_beside_it_is_made_when_asked_for():
    async def body(scene):
        async with scene.pool.lease(Environment(files={"a.txt": "one"})) as sandbox:
            sealed = await sandbox.seal()
        async with scene.pool.lease(Environment(), beside=sealed) as checker:
            await checker.exec(("look",))
            assert scene.source.scripted.executed[-1].artefacts == {"a.txt": b"one"}
        async with scene.pool.lease(Environment(), over=sealed) as branch:
            assert branch.files == {"a.txt": b"one"}
        assert scene.source.lines == ["true", "look"]
        assert scene.pool.stats().keys == 1
        await sealed.close()

    play(body)


def test_what_is_warm_and_not_asked_for_any_more_is_ended_in_time():
    async def body(scene):
        await scene.stock()
        scene.clock.advance(58)
        await turns()
        assert scene.source.alive == 1
        scene.clock.advance(2)
        await turns()
        assert scene.source.alive == 0
        assert scene.pool.stats().keys == 0

    play(body, keep_s=60.0)


def test_who_leaves_one_does_not_wait_for_its_end_which_takes_room_until_then():
    async def body(scene):
        scene.source.may_end.clear()
        await scene.visit()
        assert scene.pool.stats().draining == 1
        waits = asyncio.create_task(scene.visit())
        await turns()
        assert not waits.done()
        scene.source.may_end.set()
        await waits

    play(body, max_alive=1)


def test_an_end_that_failed_is_counted():
    async def body(scene):
        scene.source.end_failure = SandboxError("it would not die")
        await scene.visit()
        await turns()
        assert scene.pool.stats().failed == 1

    play(body)


def test_what_is_started_ahead_is_kept_apart_by_its_words_and_files():
    async def body(scene):
        files = {"a.txt": "one"}
        for _ in range(2):
            async with scene.pool.lease(Environment(files=files), ahead=("look",)) as sandbox:
                await sandbox.exec(("look",))
            scene.clock.advance(1)
        await turns()
        assert scene.pool.stats().idle == 1
        assert scene.source.made[-1].files == {"a.txt": b"one"}
        assert scene.source.ahead == [("look",)] * 3
        assert scene.source.lines == ["look"] * 2  # nothing else ran to warm them
        for other, ahead in ((files, ("make",)), (files, ()), ({"a.txt": "two"}, ("look",))):
            async with scene.pool.lease(Environment(files=other), ahead=ahead):
                assert scene.pool.stats().found_warm == 0
        async with scene.pool.lease(Environment(files=files), ahead=("look",)):
            assert scene.pool.stats().found_warm == 1

    play(body)


# --- room -------------------------------------------------------------------------------------


def test_who_finds_no_room_waits_and_checks_take_their_turn_with_attempts():
    async def body(scene):
        order = []

        async def use(name, **given):
            async with scene.pool.lease(Environment(), **given):
                order.append(name)
                assert scene.source.alive == 1
                await turns()

        async with scene.pool.lease(Environment()) as sandbox:
            sealed = await sandbox.seal()
            waiting = [
                asyncio.create_task(use("attempt")),
                asyncio.create_task(use("check", beside=sealed)),
                asyncio.create_task(use("another")),
            ]
            await turns()
            assert (order, scene.pool.stats().waiting) == ([], 3)
        await asyncio.gather(*waiting)
        assert order == ["attempt", "check", "another"]
        await sealed.close()

    play(body, max_alive=1)


def test_a_cancelled_requester_loses_nothing():
    async def body(scene):
        scene.source.open.clear()
        gives_up = asyncio.create_task(scene.visit())
        await turns()
        assert scene.pool.stats().warming == 1
        gives_up.cancel()
        await asyncio.wait((gives_up,))
        scene.pool.check()
        scene.source.open.set()
        await turns()
        assert scene.pool.stats().idle == 1
        await scene.visit()
        assert (scene.pool.stats().started, scene.pool.stats().found_warm) == (1, 1)

    play(body)


@pytest.mark.parametrize("after", [False, True], ids=("before", "after"))
def test_one_cancelled_in_the_moment_of_its_turn_leaves_the_room_to_the_next(after):
    async def body(scene):
        async with scene.pool.lease(Environment()):
            unlucky = asyncio.create_task(scene.visit())
            behind = asyncio.create_task(scene.visit())
            await turns()
            loop = asyncio.get_running_loop()
            later = functools.partial(loop.call_soon, unlucky.cancel)
            scene.source.on_made = later if after else unlucky.cancel
        await asyncio.wait((unlucky,))
        assert unlucky.cancelled()
        await behind
        assert scene.pool.stats().started == 3

    play(body, max_alive=1)


def test_one_that_is_cancelled_lets_go_of_what_it_asked_for_alone():
    async def body(scene):
        async with scene.pool.lease(Environment()) as sandbox:
            sealed = await sandbox.seal()
        scene.source.open.clear()
        gives_up = asyncio.create_task(scene.visit(beside=sealed))
        await turns()
        assert scene.source.alive == 1
        gives_up.cancel()
        await asyncio.wait((gives_up,))
        await turns()
        assert scene.source.alive == 0
        await sealed.close()

    play(body)


# --- trouble ----------------------------------------------------------------------------------


def test_one_that_died_while_it_was_idle_is_not_handed_out():
    async def body(scene):
        await scene.stock()
        await scene.source.made[-1].close()
        name = await scene.visit()
        assert name != scene.source.made[2].name
        assert scene.pool.stats().dead == 1

    play(body)


def test_what_the_source_cannot_make_is_told_to_its_requester_and_the_next_one_is_made():
    async def body(scene):
        with pytest.raises(SandboxError, match="no room"):
            await scene.visit()
        await scene.visit()
        with pytest.raises(SandboxError, match="set-up 'break' failed"):
            await scene.visit(Environment(setup=("break",)))
        with pytest.raises(IsolationError, match="vm"):
            await scene.visit(Environment(isolation=Isolation.VIRTUAL_MACHINE))
        with pytest.raises(UsageError, match="workspace"):
            await scene.visit(Environment(files={"../a": ""}))

    play(body, failures=[SandboxError("no room")])


def test_an_error_of_whoever_holds_one_comes_through_and_ends_it():
    async def body(scene):
        with pytest.raises(ZeroDivisionError):
            async with scene.pool.lease(Environment()):
                raise ZeroDivisionError
        await turns()
        assert scene.source.alive == 0

    play(body)


def test_closing_ends_what_is_leased_and_refuses_who_waits():
    async def main():
        scene = Scene(Watched(), max_alive=2)
        async with scene.pool.lease(Environment()) as held:
            scene.source.open.clear()
            gives_up, waiting = (asyncio.create_task(scene.visit()) for _ in range(2))
            await turns()
            assert (scene.pool.stats().warming, scene.pool.stats().waiting) == (1, 2)
            gives_up.cancel()
            await scene.pool.close()
            assert (scene.source.alive, scene.pool.stats().alive) == (0, 0)
            with pytest.raises(asyncio.CancelledError):
                await gives_up
            with pytest.raises(SandboxError, match="closed"):
                await waiting
            with pytest.raises(SandboxError, match="not open"):
                await held.exec(("look",))
        with pytest.raises(SandboxError, match="closed"):
            await scene.visit()
        await scene.pool.close()
        scene.pool.check()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(10))
def test_in_any_order_of_leases_failures_cancellations_and_deaths_nothing_is_lost(seed):
    chance = random.Random(seed)

    async def use(scene):
        sealed = None
        try:
            environment = Environment(memory_bytes=chance.choice((1, 2)))
            async with scene.pool.lease(environment) as sandbox:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                if chance.random() < 0.3:
                    raise ZeroDivisionError
                if chance.random() < 0.3:
                    sealed = await sandbox.seal()
            if sealed is not None:
                await scene.visit(beside=sealed)
        finally:
            if sealed is not None:
                await sealed.close()

    async def body(scene):
        users = []
        for _ in range(150):
            users.append(asyncio.create_task(use(scene)))
            if chance.random() < 0.3:
                chance.choice(users).cancel()
            if chance.random() < 0.1:
                scene.clock.advance(20)
            if scene.source.made and chance.random() < 0.1:
                await scene.source.made[-1].close()
            for _ in range(chance.randrange(8)):
                await asyncio.sleep(0)
            scene.pool.check()
        results = await asyncio.gather(*users, return_exceptions=True)
        wanted = (type(None), ZeroDivisionError, SandboxError, asyncio.CancelledError)
        assert {type(result) for result in results} <= set(wanted)
        assert results.count(None) > 20

    play(body, max_alive=4, keep_s=30.0, failures=[SandboxError("no room")] * 5)


# --- over bubblewrap --------------------------------------------------------------------------


def test_over_bubblewrap_a_warm_one_is_live_and_clean_and_all_of_them_end(sandboxes):
    before = sandboxes.stats().open

    async def body():
        clock = ManualClock()
        async with PooledSandboxes(sandboxes, clock) as pool:
            for _ in range(2):
                async with pool.lease(Environment(files={"a.txt": "old"})) as sandbox:
                    assert (await sandbox.exec(("cat", "a.txt"))).stdout == "old"
                clock.advance(1)
            while not pool.stats().idle:
                await asyncio.sleep(0)
            async with pool.lease(Environment(files={"b.txt": "new"})) as sandbox:
                assert pool.stats().found_warm == 1
                result = await sandbox.exec(("sh", "-c", "ls; cat b.txt"))
                assert result.stdout == "b.txt\nnew"
                sealed = await sandbox.seal()
            async with pool.lease(Environment(), beside=sealed) as checker:
                assert (await checker.exec(("cat", "/artefacts/b.txt"))).stdout == "new"
            await sealed.close()
            with pytest.raises(SandboxError, match="laid out: a/b"):
                async with pool.lease(Environment(files={"a": "", "a/b": ""})):
                    pass
            pool.check()
        assert pool.stats().alive == 0

    asyncio.run(body())
    assert sandboxes.stats().open == before


def test_over_bubblewrap_a_lost_holder_costs_the_next_requester_nothing_but_time(machine):
    async def body():
        clock = ManualClock()
        async with BubblewrapSandboxes() as source, PooledSandboxes(source, clock) as pool:
            for _ in range(2):
                async with pool.lease(Environment()) as sandbox:
                    await sandbox.exec(("true",))
                clock.advance(1)
            while not pool.stats().idle:
                await asyncio.sleep(0)
            sandbox.channel.close()
            await sandbox.channel.closed()
            async with pool.lease(Environment()) as sandbox:
                assert (await sandbox.exec(("echo", "back"))).stdout == "back\n"
            assert pool.stats().dead == 1
            pool.check()
        source.check()
        assert source.stats().open == source.stats().lost == 0

    asyncio.run(body())


def test_a_machine_has_room_for_some():
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert room() >= 8
    assert room() == 8 or room() * (128 << 20) <= pages


def test_a_limit_of_a_container_counts_where_it_is_less_than_the_machine_has(monkeypatch):
    """2 GiB of a large machine: it began more sandboxes than fit."""
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 24, "SC_PAGE_SIZE": 4096}.get)
    for limit, fitting in ((2 << 30, 16), (None, 512), (1 << 62, 512), (5, 8)):
        monkeypatch.setattr(pooled, "memory_limit", lambda *texts, limit=limit: limit)
        assert room() == fitting
