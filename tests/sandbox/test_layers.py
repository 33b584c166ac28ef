"""Layers of the bubblewrap driver, and what set-ups made."""

import asyncio

import pytest

from posttrain.core.containment import ExecResult, Snapshots
from posttrain.core.errors import SandboxError, UsageError
from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.disks import MOST_LAYERS
from posttrain.sandbox.scripted import ScriptedSandboxes
from posttrain.sandbox.source import Prepared, key_of


async def shell(sandbox, line):
    result = await sandbox.exec(("sh", "-c", line))
    assert result.exit_code == 0, result
    return result.stdout


def test_each_layer_has_a_disk_of_its_own_size(sandboxes, machine):
    if machine.capabilities.snapshots is not Snapshots.LAYERS:
        pytest.skip("snapshots are copies here: what goes on has one disk")

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


def test_a_workspace_of_another_source_of_the_same_kind_is_refused(sandboxes):
    async def body():
        async with BubblewrapSandboxes() as other, other.lease(Environment()) as sandbox:
            sealed = await sandbox.seal()
            with pytest.raises(UsageError, match="this source"):
                async with sandboxes.lease(Environment(), beside=sealed):
                    pass

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

    if asyncio.run(sandboxes.capabilities()).snapshots is not Snapshots.LAYERS:
        pytest.skip("snapshots are copies here: any number works")
    asyncio.run(body())


def test_environments_share_only_where_all_is_the_same():
    same = Environment(files={"a": "1", "b": "2"}, setup=("true",))
    assert key_of(same) == key_of(Environment(files={"b": "2", "a": "1"}, setup=("true",)))
    for change in ({"setup": ("false",)}, {"files": {"a": "1"}}, {"disk_bytes": 1 << 20}):
        other = Environment(**{"files": same.files, "setup": same.setup, **change})
        assert key_of(other) != key_of(same)
