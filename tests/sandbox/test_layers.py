"""Snapshots, and sandboxes that go on over them."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from posttrain.core.containment import ExecResult
from posttrain.core.errors import SandboxError
from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.disks import MOST_LAYERS
from posttrain.sandbox.prepared import Prepared, key_of
from posttrain.sandbox.scripted import ScriptedSandboxes
from tests.sandbox.conftest import processes_named


@pytest.fixture(params=["shared", "copied"])
def layered(request, machine):
    """Sandboxes whose snapshots are shared as layers, and such that copy them."""
    source = BubblewrapSandboxes(share=request.param == "shared")
    yield source
    stats = source.stats()
    asyncio.run(source.close())
    assert (stats.open, stats.sealed) == (0, 0)


async def shell(sandbox, line):
    result = await sandbox.exec(("sh", "-c", line))
    assert result.exit_code == 0, result
    return result.stdout


def test_a_sandbox_goes_on_from_its_snapshot_and_others_begin_there(layered, marker):
    async def body():
        async with layered.lease(Environment(files={"a": "given"})) as first:
            await shell(
                first, f"echo 1 > n; mkdir d; echo x > d/x; echo t > /tmp/t; sleep 99 & # {marker}"
            )
            snapshot = await first.snapshot()
            assert processes_named(marker) == []
            await shell(first, "echo 2 > n; rm -r d; echo late > late")
            async with layered.lease(Environment(), over=snapshot) as second:
                assert await shell(second, "cat a n d/x /tmp/t; ls") == "given1\nx\nt\na\nd\nn\n"
                await shell(second, "rm a; mv d e; echo 3 >> n")
                assert await shell(second, "cat n e/x; ls") == "1\n3\nx\ne\nn\n"
            assert await shell(first, "cat n; ls") == "2\na\nlate\nn\n"
        assert await snapshot.read("n", max_bytes=9) == b"1\n"
        assert await snapshot.read("late", max_bytes=9) is None
        paths = {entry.path for entry in await snapshot.entries(max_entries=99)}
        assert paths == {"a", "d", "d/x", "n"}
        await snapshot.close()

    asyncio.run(body())


def test_layers_stack_and_outlive_the_handles_of_those_below(layered):
    async def body():
        snapshot = None
        for number in range(12):
            async with layered.lease(Environment(), over=snapshot) as sandbox:
                await shell(sandbox, f"echo {number} >> log; echo {number} > f{number % 3}")
                if snapshot is not None:
                    await snapshot.close()
                snapshot = await sandbox.snapshot()
                await shell(sandbox, "echo never seen again >> log")
        async with layered.lease(Environment(), over=snapshot) as sandbox:
            lines = (await shell(sandbox, "cat log f0 f1 f2")).split()
            assert lines == [*map(str, range(12)), "9", "10", "11"]
            sealed = await sandbox.seal()
        assert (await sealed.read("log", max_bytes=99)).split() == [b"%d" % n for n in range(12)]
        async with layered.lease(Environment(), beside=sealed, over=snapshot) as sandbox:
            assert await shell(sandbox, "cat /artefacts/f2") == "11\n"
            again = await sandbox.snapshot()
            assert await shell(sandbox, "cat /artefacts/f2; cat f2") == "11\n11\n"
            failed = await sandbox.exec(("sh", "-c", "echo x > /artefacts/f2"))
            assert "Read-only" in failed.stderr
        for each in (snapshot, sealed, again):
            await each.close()

    asyncio.run(body())


def test_a_fork_of_many_is_independent(layered):
    async def body():
        async with AsyncExitStack() as stack:
            parent = await stack.enter_async_context(layered.lease(Environment()))
            await shell(parent, "echo base > file")
            snapshot = await parent.snapshot()
            stack.push_async_callback(snapshot.close)
            forks = [
                await stack.enter_async_context(layered.lease(Environment(), over=snapshot))
                for _ in range(16)
            ]
            await asyncio.gather(
                *(shell(fork, f"echo {n} >> file") for n, fork in enumerate(forks))
            )
            texts = await asyncio.gather(*(shell(fork, "cat file") for fork in forks))
            assert texts == [f"base\n{n}\n" for n in range(16)]
            assert await shell(parent, "cat file") == "base\n"

    asyncio.run(body())


def test_each_layer_has_a_disk_of_its_own_size(sandboxes):
    environment = Environment(disk_bytes=4 << 20)

    async def body():
        async with sandboxes.lease(environment) as sandbox:
            fill = "head -c 3000000 /dev/zero > "
            await shell(sandbox, f"{fill} one")
            snapshot = await sandbox.snapshot()
            await shell(sandbox, f"{fill} two")
            full = await sandbox.exec(("sh", "-c", f"{fill} three"))
            assert "No space left" in full.stderr
            await snapshot.close()

    asyncio.run(body())


def test_a_set_up_runs_once_for_all_leases_of_its_environment(sandboxes):
    environment = Environment(setup=("cat /proc/sys/kernel/random/uuid > made",))

    async def made(given):
        async with sandboxes.lease(given) as sandbox:
            return await sandbox.read("made", max_bytes=99)

    async def body():
        before = sandboxes.prepared
        first, *others = await asyncio.gather(*(made(environment) for _ in range(4)))
        assert others == [first] * 3
        other = Environment(setup=environment.setup, files={"a": "b"})
        assert await made(other) != first
        assert sandboxes.prepared == before + 2

    asyncio.run(body())


def test_set_ups_that_were_not_used_for_long_are_let_go():
    async def body():
        source = ScriptedSandboxes(lambda command: ExecResult(exit_code=0, stdout="", stderr=""))

        async def make():
            async with source.lease(Environment()) as sandbox:
                return await sandbox.seal()

        prepared = Prepared(most=2)
        environments = [Environment(setup=(f"echo {n}",)) for n in range(3)]

        async def used(environment):
            async with prepared.use(environment, make) as sealed:
                return sealed

        kept = [await used(environment) for environment in environments[:2]]
        assert await used(environments[0]) is kept[0]
        await used(environments[2])
        assert source.stats().sealed == len(prepared) == 2
        with pytest.raises(SandboxError):
            await kept[1].read("a", max_bytes=1)
        await prepared.clear()
        assert source.stats().sealed == 0

    asyncio.run(body())


def test_a_set_up_in_use_is_kept_however_many_others_are_made():
    async def body():
        source = ScriptedSandboxes(lambda command: ExecResult(exit_code=0, stdout="", stderr=""))

        async def make():
            async with source.lease(Environment()) as sandbox:
                return await sandbox.seal()

        prepared = Prepared(most=1)
        first, second = (Environment(setup=(f"echo {n}",)) for n in range(2))
        async with prepared.use(first, make) as one, prepared.use(second, make) as two:
            assert one is not two
            assert await one.read("a", max_bytes=1) is await two.read("a", max_bytes=1) is None
        assert source.stats().sealed == len(prepared) == 1
        await prepared.clear()

    asyncio.run(body())


def test_a_set_up_that_failed_is_made_once_for_all_who_waited():
    async def body():
        source = ScriptedSandboxes(lambda command: ExecResult(exit_code=0, stdout="", stderr=""))
        made = 0

        async def make():
            nonlocal made
            made += 1
            await asyncio.sleep(0)
            if made == 1:
                raise SandboxError("set-up failed")
            async with source.lease(Environment()) as sandbox:
                return await sandbox.seal()

        prepared = Prepared()
        environment = Environment(setup=("echo",))

        async def use():
            async with prepared.use(environment, make):
                pass

        first, second = asyncio.ensure_future(use()), asyncio.ensure_future(use())
        with pytest.raises(SandboxError):
            await first
        third = asyncio.ensure_future(use())
        await asyncio.gather(second, third)
        assert (made, source.stats().sealed) == (2, 1)
        await prepared.clear()

    asyncio.run(body())


def test_one_snapshot_too_many_loses_nothing(sandboxes):
    async def body():
        async with sandboxes.lease(Environment(files={"a": "1"})) as sandbox:
            kept = [await sandbox.snapshot() for _ in range(MOST_LAYERS)]
            with pytest.raises(SandboxError, match="snapshots of one another"):
                await sandbox.snapshot()
            assert await shell(sandbox, "cat a") == "1"
            for each in kept:
                await each.close()

    if not asyncio.run(sandboxes.abilities()).shares:
        pytest.skip("snapshots are copies here: any number works")
    asyncio.run(body())


def test_copies_keep_holes_and_hard_links_and_leave_out_pipes():
    made = (
        "mkfifo pipe; truncate -s 12M holes more; "
        "printf x | dd of=holes bs=1 seek=5M conv=notrunc; "
        "echo same > one; ln one two; ln -s one link; mkdir d; chmod 700 d; echo in > d/in"
    )

    async def body(source):
        async with source.lease(Environment(disk_bytes=16 << 20)) as sandbox:
            await shell(sandbox, made)
            snapshot = await sandbox.snapshot()
            assert await shell(sandbox, "stat -c %h one two; echo more >> one; cat two") == (
                "2\n2\nsame\nmore\n"
            )
            assert await shell(sandbox, "ls; cat link d/in; stat -c '%a' d") == (
                "d\nholes\nlink\nmore\none\ntwo\nsame\nmore\nin\n700\n"
            )
            assert await shell(sandbox, "stat -c %s holes; tail -c +5242881 holes | head -c1") == (
                f"{12 << 20}\nx"
            )
            await snapshot.close()
        await source.close()

    asyncio.run(body(BubblewrapSandboxes(share=False)))


def test_environments_share_only_where_all_is_the_same():
    same = Environment(files={"a": "1", "b": "2"}, setup=("true",))
    assert key_of(same) == key_of(Environment(files={"b": "2", "a": "1"}, setup=("true",)))
    for change in ({"setup": ("false",)}, {"files": {"a": "1"}}, {"disk_bytes": 1 << 20}):
        other = Environment(**{"files": same.files, "setup": same.setup, **change})
        assert key_of(other) != key_of(same)
