"""Limits hold, the command gets a truthful result, and the sandbox stays usable."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from posttrain.core.task import Environment
from posttrain.sandbox.limits import CgroupPlace, cgroup_places
from tests.sandbox.conftest import children, processes_named, tree_below

SMALL = Environment(memory_bytes=128 << 20, disk_bytes=4 << 20, max_processes=12)


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


def test_processes_are_limited_for_each_sandbox_alone(inside):
    source = (
        "import os, signal\n"
        "made = []\n"
        "try:\n"
        "    for _ in range(40):\n"
        "        pid = os.fork()\n"
        "        if pid == 0: signal.pause()\n"
        "        made.append(pid)\n"
        "except OSError as error: print(type(error).__name__, len(made))\n"
    )

    async def body(sandbox):
        for _ in range(2):
            result = await sandbox.exec(("python3", "-c", source))
            assert result.stdout == "BlockingIOError 11\n", result
            full = await sandbox.exec(("sh", "-c", "true & wait"))
            assert "fork" in full.stderr, full
            assert (await sandbox.exec(("sh", "-c", "kill -9 -1"))).exit_code == 0
        assert await usable(sandbox)

    inside(body, SMALL)


SPIN = "python3 -c 'import time\nwhile time.process_time() < .06: pass'"


@pytest.mark.parametrize(("given", "quota"), [({}, "100000"), ({"cores": 0.1}, "10000")])
def test_processor_time_of_the_whole_tree_is_limited_where_groups_can_be_made(
    inside, machine, given, quota
):
    """Told by the kernel's own counts: no clock of a busy machine decides."""
    if not machine.cores:
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
            before = disks_of(sandbox)
        assert disks_of(sandbox) < before

    def disks_of(sandbox):
        """Descriptors by which holders of this process keep disks."""
        family = [pid for child in children() for pid in tree_below(child)]
        return sum(os.readlink(link).startswith("mnt:") for pid in family
                   for link in Path(f"/proc/{pid}/fd").iterdir())  # fmt: skip

    asyncio.run(body())


def test_all_writable_places_share_one_disk(inside):
    async def body(sandbox):
        await sandbox.exec(("sh", "-c", "head -c 3000000 /dev/zero > /tmp/a"))
        result = await sandbox.exec(("sh", "-c", "head -c 3000000 /dev/zero > /workspace/b"))
        assert "space" in result.stderr
        with pytest.raises(OSError, match="space"):
            await sandbox.write("c", bytes(3_000_000))
        await sandbox.exec(("sh", "-c", "rm /tmp/a b c"))
        await sandbox.write("c", bytes(3_000_000))

    inside(body, SMALL)


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


@pytest.mark.parametrize(("size", "truncated"), [(9_999, False), (10_000, False), (10_001, True)])
def test_the_output_limit_is_exact(inside, size, truncated):
    async def body(sandbox):
        result = await sandbox.exec(("sh", "-c", f"head -c {size} /dev/zero | tr '\\0' x"))
        assert result.truncated is truncated
        assert (result.stdout == "x" * size) is not truncated

    inside(body, Environment(max_output_bytes=10_000))


def test_bytes_that_are_no_text_do_not_lose_the_rest(inside):
    async def body(sandbox):
        result = await sandbox.exec(("printf", r"ok\377\344\n"))
        assert (result.stdout, result.exit_code) == ("ok\ufffd\ufffd\n", 0)

    inside(body)


def test_time_is_limited_whatever_the_command_ignores(inside, marker):
    async def body(sandbox):
        script = f"trap '' TERM INT HUP; echo started; while :; do :; done # {marker}"
        started = time.monotonic()
        result = await sandbox.exec(("sh", "-c", script), timeout_s=0.4)
        assert time.monotonic() - started < 5
        assert result.timed_out
        assert result.exit_code is None
        assert result.stdout == "started\n"
        assert processes_named(marker) == []
        assert await usable(sandbox)

    inside(body)


@pytest.mark.parametrize("ending", ["exit 0", "sleep 60"])
def test_daemons_outlive_a_command_but_not_its_time_limit(inside, marker, ending):
    source = (
        "import os, signal, sys\n"
        "for _ in range(2):\n"
        "    if os.fork(): os._exit(0)\n"
        "    os.setsid()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
        "open('up', 'w').write('1')\n"
        "signal.pause()\n"
    )

    async def body(sandbox):
        await sandbox.write("daemon.py", source.encode())
        script = f"python3 daemon.py {marker} & while [ ! -s up ]; do :; done; {ending}"
        result = await sandbox.exec(("sh", "-c", script), timeout_s=1.5)
        assert result.timed_out == (ending == "sleep 60")
        assert await sandbox.read("up", max_bytes=1) == b"1"
        assert len(processes_named(marker)) == (ending == "exit 0")
        await sandbox.close()
        assert processes_named(marker) == []

    inside(body)
