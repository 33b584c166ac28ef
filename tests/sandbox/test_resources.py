"""Limits hold, the command gets a truthful result, and the sandbox stays usable."""

import asyncio
import os
from pathlib import Path

import pytest

from posttrain.core.task import Environment
from posttrain.sandbox.cgroups import CgroupPlace, cgroup_places
from tests.sandbox.conftest import children, tree_below


def groups_named(lease: str) -> list[CgroupPlace]:
    """Groups of a lease of this process's holders."""
    places = cgroup_places(
        Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
    )
    made = (place.below(f"posttrain-{maker}").below(lease) for place in places
            for maker in children())  # fmt: skip
    return [group for group in made if os.path.isdir(group.memory)]


async def usable(sandbox) -> bool:
    return (await sandbox.exec(("sh", "-c", "echo fine > f && cat f"))).stdout == "fine\n"


SPIN = "python3 -c 'import time\nwhile time.process_time() < .06: pass'"


@pytest.mark.parametrize(("given", "quota"), [({}, "100000"), ({"cores": 0.1}, "10000")])
def test_processor_time_of_the_whole_tree_is_limited_where_groups_can_be_made(
    inside, machine, given, quota
):
    """Told by the kernel's own counts: no clock of a busy machine decides."""
    if not machine.capabilities.cores:
        pytest.skip("no control groups of processor time here")

    async def body(sandbox):
        result = await sandbox.exec(("sh", "-c", f"{SPIN} & {SPIN} & wait"))
        assert result.exit_code == 0
        group = groups_named(sandbox.name)[0]
        (file,) = group.quota(1.0)
        assert Path(file).read_text().split()[0] == quota
        counts = dict(
            line.split() for line in Path(f"{group.cpu}/cpu.stat").read_text().splitlines()
        )
        assert not given or int(counts["nr_throttled"]) > 0

    inside(body, Environment(**given))


FILL = """
import errno, os, sys
def told(act):
    try: act()
    except OSError as error: return errno.errorcode[error.errno]
    return "done"
def fill(path):
    with open(path, "wb", 0) as file:
        for _ in range(1024): file.write(bytes(1 << 20))
def reserve(path):
    number = os.open(path, os.O_CREAT | os.O_RDWR)
    os.posix_fallocate(number, 0, 10 << 30)
def many(folder):
    os.mkdir(folder)
    for i in range(1_000_000): os.close(os.open(f"{folder}/{i}", os.O_CREAT))
for place in ("/tmp", "/workspace", "/dev/shm", "/dev"):
    print(place, told(lambda: fill(f"{place}/big")), told(lambda: reserve(f"{place}/hole")))
print("files", told(lambda: many("/workspace/many")))
"""


def test_no_disk_of_the_host_is_filled_BR_45(sandboxes):
    """1 GB to each place, 10 GB reserved, a million files, under a limit of 64 MB."""
    environment = Environment(disk_bytes=64 << 20, memory_bytes=256 << 20)

    async def body():
        async with sandboxes.lease(environment) as sandbox:
            result = await sandbox.exec(("python3", "-c", FILL), timeout_s=30)
            assert result.exit_code == 0, result
            said = dict(line.split(" ", 1) for line in result.stdout.splitlines())
            assert said.pop("/dev") == "EROFS EROFS"
            refused = {"ENOSPC", "EFBIG"}
            for name in ("/tmp", "/workspace", "/dev/shm", "files"):
                assert set(said[name].split()) <= refused, said
            assert result.disk_full
            assert (await sandbox.usage()).disk_bytes <= 1.1 * environment.disk_bytes
            await sandbox.exec(("sh", "-c", "rm -rf many big hole /tmp/* /dev/shm/*"))
            assert (await sandbox.usage()).disk_bytes < 1 << 20
            assert await usable(sandbox)
            before = disks_of()
        assert before is None or disks_of() < before

    def disks_of():
        """Descriptors by which holders of this process keep disks; only root may look at them."""
        if os.getuid() != 0:
            return None
        family = [pid for child in children() for pid in tree_below(child)]
        return sum(os.readlink(link).startswith("mnt:") for pid in family
                   for link in Path(f"/proc/{pid}/fd").iterdir())  # fmt: skip

    asyncio.run(body())


def test_a_flood_of_both_streams_grows_nobody_BR_38(inside):
    """Unbounded buffering killed the server."""
    flood = "head -c 300000000 /dev/zero | tr '\\0' x"

    def most_kib():
        ours = [os.getpid(), *(pid for child in children() for pid in (child, *tree_below(child)))]
        status = {pid: Path(f"/proc/{pid}/status").read_text() for pid in ours}
        return {pid: int(text.split("VmHWM:")[1].split()[0]) for pid, text in status.items()}

    async def body(sandbox):
        await sandbox.exec(("true",))
        before = most_kib()
        assert len(before) >= 4  # this process, the keeper, the porter, the holder
        result = await sandbox.exec(("sh", "-c", f"{flood} & {flood} >&2; wait"), timeout_s=60)
        after = most_kib()
        assert all(after[pid] - before[pid] < 50_000 for pid in before if pid in after)
        assert before.keys() <= after.keys()
        for text in (result.stdout, result.stderr):
            assert text.startswith("xxx")
            assert "of 300000000 bytes left out" in text
            assert len(text) < 11_000
        assert result.truncated

    inside(body, Environment(max_output_bytes=10_000))
