"""What was cancelled or lost in the middle is let go, and what comes after it works."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from posttrain.core.errors import SandboxError
from posttrain.core.task import Environment, Network
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from tests.sandbox.conftest import all_end, children, processes_named, tree_below


def children_of(pid: int) -> dict[int, str]:
    """A process's children, by number: their programs."""
    numbers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child): Path(f"/proc/{child}/comm").read_text().strip() for child in numbers}


def holder_of(marker: str) -> int:
    """The holder of a running command."""
    (keeper,) = [c for c in children() if set(processes_named(marker)) & set(tree_below(c))]
    return tree_below(keeper)[1]


async def running(sandbox, marker: str) -> asyncio.Task:
    """A command that goes on until it is ended."""
    task = asyncio.ensure_future(sandbox.exec(("sh", "-c", f"sleep 60 # {marker}"), timeout_s=50))
    while not processes_named(marker):
        await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_what_follows_a_cancelled_command_does_not_end_with_it(inside, marker, turns):
    async def body(sandbox):
        task = await running(sandbox, marker)
        task.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        result = await sandbox.exec(("sh", "-c", "echo fine"))
        assert (result.exit_code, result.stdout) == (0, "fine\n")
        assert processes_named(marker) == []

    inside(body)


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_a_cancelled_snapshot_is_kept_by_nobody(sandboxes, turns):
    async def body():
        before = sandboxes.stats()
        async with sandboxes.lease(Environment()) as sandbox:
            await sandbox.exec(("sh", "-c", "echo kept > file; sleep 60 &"))
            task = asyncio.ensure_future(sandbox.snapshot())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).close()
            assert await sandbox.read("file", max_bytes=9) == b"kept\n"
            wanted = (before.open + 1, before.sealed)
            held, stats = None, before
            async with asyncio.timeout(20):  # what nobody took is closed in the background
                while ((stats.open, stats.sealed), held) != (wanted, sum(wanted)):
                    held = (await sandbox.channel.request({"op": "stats"})).head["leases"]
                    stats = sandboxes.stats()

    asyncio.run(body())


def test_a_lost_maker_of_ushers_is_replaced_and_sandboxes_go_on(machine, marker):
    async def body():
        async with BubblewrapSandboxes() as source, source.lease(Environment()) as first:
            task = await running(first, marker)
            below = children_of(holder_of(marker))
            (maker,) = [pid for pid, name in below.items() if name not in ("bwrap", "cat")]
            os.kill(maker, signal.SIGKILL)
            assert all_end([maker], within_s=10)
            assert (await first.exec(("echo", "on"))).stdout == "on\n"
            async with source.lease(Environment()) as second:
                assert (await second.exec(("echo", "made"))).stdout == "made\n"
            assert not task.done()
            await first.kill()
            assert (await first.exec(("echo", "anew"))).stdout == "anew\n"
            await task

    asyncio.run(body())


def test_a_way_out_of_one_sandbox_is_not_in_the_processes_of_another(machine, marker):
    reaching = Environment(network=Network(allow=("a.example.org:443",)))

    async def body():
        async with BubblewrapSandboxes() as source, source.lease(reaching) as first:
            await first.exec(("true",))
            async with source.lease(Environment()) as second:
                task = await running(second, marker)
                (command, *_) = processes_named(marker)
                namespace = os.stat(f"/proc/{command}/ns/net").st_ino
                below = [p for p in tree_below(holder_of(marker)) if _network(p) == namespace]
                held = [
                    os.readlink(file) for p in below for file in Path(f"/proc/{p}/fd").iterdir()
                ]
                sockets = [link for link in held if link.startswith("socket:")]
                assert len(below) >= 3
                assert len(sockets) == 1, held  # its usher's line
                await second.kill()
                await task

    asyncio.run(body())


def _network(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def test_a_limit_on_memory_below_what_an_usher_needs_still_runs_commands(inside):
    async def body(sandbox):
        assert (await sandbox.exec(("echo", "small"))).stdout == "small\n"
        result = await sandbox.exec(("tail", "/dev/zero"))
        assert result.exit_code not in (0, None)
        assert (await sandbox.exec(("echo", "again"))).stdout == "again\n"

    inside(body, Environment(memory_bytes=16 << 20))


def test_many_who_find_the_holder_lost_start_one(machine, marker):
    prepared = Environment(setup=("echo made > made",))

    async def use(source, environment=prepared):
        async with source.lease(environment) as sandbox:
            return (await sandbox.exec(("cat", "made"))).stdout

    async def body():
        async with BubblewrapSandboxes() as source:
            async with source.lease(prepared) as sandbox:
                sealed = await sandbox.seal()
                sandbox.channel.close()
                await sandbox.channel.closed()
            with pytest.raises(SandboxError, match="lost with its holder"):
                async with source.lease(Environment(), over=sealed):
                    pass
            await sealed.close()
            assert await asyncio.gather(*(use(source) for _ in range(5))) == ["made\n"] * 5
            assert len(children()) == len(before) + 1
            source.check()
            assert (source.stats().open, source.stats().sealed) == (0, source.prepared)
            assert source.prepared == 1

    before = children()
    asyncio.run(body())
    assert children() == before


def test_a_set_up_that_was_being_made_when_its_holder_was_lost_is_not_kept(machine, marker):
    slow = Environment(setup=(f"echo up > up; sleep 60 # {marker}",), exec_timeout_s=50)
    quick = Environment(setup=("echo made > made",))

    async def lease(source, environment):
        async with source.lease(environment) as sandbox:
            return await sandbox.exec(("cat", "made"))

    async def body():
        async with BubblewrapSandboxes() as source:
            making = asyncio.ensure_future(lease(source, slow))
            while not processes_named(marker):
                await asyncio.sleep(0)
            os.kill(holder_of(marker), signal.SIGKILL)
            with pytest.raises(SandboxError, match="gone"):
                await making
            assert (await lease(source, quick)).stdout == "made\n"
            assert source.prepared == source.stats().sealed == 1

    asyncio.run(body())
