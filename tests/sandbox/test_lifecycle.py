"""Nothing is left behind, whoever dies."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.core.containment import Bound
from posttrain.core.errors import SandboxError
from posttrain.core.task import Environment
from posttrain.sandbox import cgroups
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.cgroups import CgroupPlace
from tests.sandbox.conftest import (
    all_end,
    children,
    groups_of,
    host_mounts,
    processes_named,
    tree_below,
)

ROOT = str(Path(__file__).parents[2])


def mounts_and_files() -> tuple[list[str], frozenset[str]]:
    return host_mounts(), frozenset(os.listdir("/dev/shm"))


def test_close_leaves_no_process_mount_group_or_descriptor(machine, marker):
    before = (children(), mounts_and_files(), len(os.listdir("/proc/self/fd")))
    groups = set()

    async def body():
        async with BubblewrapSandboxes() as source:
            assert source.stats().made == 0
            async with source.lease(Environment()) as sandbox:
                await sandbox.exec(("sh", "-c", f"sleep 60 & # {marker}"))
                groups.update(groups_of(children() - before[0]))
                sealed = await sandbox.seal()
            async with source.lease(Environment(), beside=sealed) as sandbox:
                await sandbox.exec(("true",))
                source.check()
                assert (source.stats().open, source.stats().sealed) == (1, 1)
            await sealed.close()
            assert (source.stats().made, source.stats().closed) == (2, 2)
        await source.close()

    asyncio.run(body())
    assert processes_named(marker) == []
    after = (children(), mounts_and_files(), len(os.listdir("/proc/self/fd")))
    assert after == before
    assert bool(groups) is (machine.capabilities.limits is Bound.TREE)
    assert not [group for group in groups if os.path.exists(group)]


def test_the_holder_counts_what_the_driver_counts(sandboxes):
    async def body():
        async with sandboxes.lease(Environment()) as sandbox:
            sealed = await sandbox.seal()
            async with sandboxes.lease(Environment()) as second:
                frame = await second.channel.request({"op": "stats"})
                stats = sandboxes.stats()
                assert frame.head["leases"] == stats.open + stats.sealed
                await sealed.close()
                frame = await second.channel.request({"op": "stats"})
                stats = sandboxes.stats()
                assert frame.head["leases"] == stats.open + stats.sealed

    asyncio.run(body())


def test_a_cancelled_task_lets_its_lease_go(sandboxes, marker):
    async def use():
        async with sandboxes.lease(Environment()) as sandbox:
            await sandbox.exec(("sh", "-c", f"sleep 60 # {marker}"), timeout_s=50)

    async def body():
        task = asyncio.ensure_future(use())
        while not (found := processes_named(marker)):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all_end(found, within_s=10)
        async with sandboxes.lease(Environment()) as other:
            frame = await other.channel.request({"op": "stats"})
            leases = 1 + sandboxes.prepared
            assert frame.head == {"id": frame.head["id"], "leases": leases, "runs": 0}

    asyncio.run(body())
    assert sandboxes.stats().open == 0


def test_a_loop_that_ends_in_the_middle_lets_its_lease_go(sandboxes, marker):
    async def use():
        async with sandboxes.lease(Environment()) as sandbox:
            await sandbox.exec(("sh", "-c", f"sleep 60 # {marker}"), timeout_s=50)

    async def body():
        task = asyncio.ensure_future(use())
        while not (found := processes_named(marker)):
            await asyncio.sleep(0)
        assert not task.done()
        return found

    found = asyncio.run(body())
    assert all_end(found, within_s=10)
    assert sandboxes.stats().open == 0


LEASE_AND_WAIT = """
import asyncio, sys
from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
async def main():
    async with BubblewrapSandboxes() as source, source.lease(Environment()) as sandbox:
        await sandbox.exec(("sh", "-c", "setsid sleep 100 & sleep 100 # " + sys.argv[1]),
                           timeout_s=90)
asyncio.run(main())
"""


def name_of(pid: int) -> str:
    """A process's program; empty where it ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_a_killed_parent_leaves_nothing(machine, marker):
    parent = subprocess.Popen(
        [sys.executable, "-c", LEASE_AND_WAIT, marker], cwd=ROOT, env={"PYTHONPATH": ROOT}
    )
    try:
        while not [p for p in processes_named(marker) if name_of(p) == "sh"]:
            assert parent.poll() is None
        family = tree_below(parent.pid)
        assert len(family) >= 4
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert all_end(family, within_s=10)
    assert processes_named(marker) == []
    assert groups_of(family) == set()


def test_a_lost_holder_is_said_and_replaced(machine, marker):
    async def body():
        async with BubblewrapSandboxes() as source:
            async with source.lease(Environment()) as sandbox:
                running = asyncio.ensure_future(
                    sandbox.exec(("sh", "-c", f"sleep 60 # {marker}"), timeout_s=50)
                )
                while not (found := processes_named(marker)):
                    await asyncio.sleep(0)
                (keeper,) = [c for c in children() if set(found) & set(tree_below(c))]
                holder = tree_below(keeper)[0]
                os.kill(holder, signal.SIGKILL)
                with pytest.raises(SandboxError, match="gone"):
                    await running
                assert all_end(found, within_s=10)
                with pytest.raises(SandboxError, match="gone"):
                    await sandbox.read("x", max_bytes=1)
                with pytest.raises(SandboxError, match="gone"):
                    await sandbox.seal()
            async with source.lease(Environment()) as again:
                assert (await again.exec(("echo", "back"))).stdout == "back\n"
            source.check()

    asyncio.run(body())
    assert processes_named(marker) == []


def test_groups_of_dead_makers_are_swept(tmp_path, monkeypatch):
    """Plain folders stand in for control groups; removal is by `rmdir` in both."""
    place = CgroupPlace(version=1, memory=str(tmp_path / "m"), pids=str(tmp_path / "p"))
    for folder in place.folders:
        os.makedirs(f"{folder}/posttrain-4194305/s1")
        os.makedirs(f"{folder}/posttrain-{os.getppid()}")
        os.makedirs(f"{folder}/other")
    made = cgroups.make([place], os.getuid())
    assert made is not None
    for folder in place.folders:
        assert sorted(os.listdir(folder)) == sorted(
            ["other", f"posttrain-{os.getppid()}", f"posttrain-{os.getpid()}"]
        )
    cgroups.remove(made)
    assert f"posttrain-{os.getpid()}" not in os.listdir(place.memory)


def test_processor_time_goes_unlimited_where_its_group_cannot_be_made_and_the_rest_stays(tmp_path):
    """Plain folders: the one of processor time lacks the kernel's file of the quota."""
    folders = {name: str(tmp_path / name) for name in ("memory", "pids", "cpu")}
    for folder in folders.values():
        os.mkdir(folder)
    made = cgroups.make([CgroupPlace(version=1, **folders)], os.getuid())
    assert made is not None
    assert made.cpu is None
    assert os.path.isdir(made.memory)
    assert os.listdir(folders["cpu"]) == []


def test_no_group_is_made_where_controllers_are_not_handed_down(tmp_path):
    (tmp_path / "cgroup.subtree_control").write_text("cpu pids\n")
    place = CgroupPlace(version=2, memory=str(tmp_path), pids=str(tmp_path))
    assert cgroups.make([place], os.getuid()) is None
    assert os.listdir(tmp_path) == ["cgroup.subtree_control"]
