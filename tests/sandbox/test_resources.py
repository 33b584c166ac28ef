"""Limits hold, the command gets a truthful result, and the sandbox stays usable."""

import time

import pytest

from posttrain.core.task import Environment
from tests.sandbox.conftest import processes_named

SMALL = Environment(memory_bytes=128 << 20, disk_bytes=4 << 20, max_processes=12)


async def usable(sandbox) -> bool:
    return (await sandbox.exec(("sh", "-c", "echo fine > f && cat f"))).stdout == "fine\n"


def test_memory_of_a_process_is_limited(inside):
    async def body(sandbox):
        result = await sandbox.exec(("python3", "-c", "x = b'x' * (200 << 20)"))
        assert result.exit_code == 1
        assert "MemoryError" in result.stderr
        assert await usable(sandbox)

    inside(body, SMALL)


def test_memory_of_the_whole_tree_is_limited_where_groups_can_be_made(inside, machine):
    if machine.limits != "tree":
        pytest.skip("no control groups here: limits hold a process each")
    source = (
        "import os\n"
        "pids = []\n"
        "for _ in range(3):\n"
        "    pids.append(os.fork())\n"
        "    if not pids[-1]: break\n"
        "x = b'x' * (60 << 20)\n"
        "if all(pids): print(sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in pids))\n"
        "else: os.read(0, 1); os._exit(0)\n"
    )

    async def body(sandbox):
        result = await sandbox.exec(("python3", "-c", source))
        assert result.exit_code in (None, 137) or "-9" in result.stdout, result
        assert await usable(sandbox)

    inside(body, SMALL)


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


@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/dev/shm", "/dev", "/", "/etc", "/usr"])
def test_no_place_takes_more_than_the_disk(inside, folder):
    async def body(sandbox):
        # Files of 1 MiB each, since a file's own size is limited too.
        script = (
            f"cd {folder}; for i in 1 2 3 4 5 6 7 8; do "
            "head -c 1048576 /dev/zero > part$i || break; done; "
            "cat part* 2>/dev/null | wc -c; rm -f part*"
        )
        result = await sandbox.exec(("sh", "-c", script))
        assert int(result.stdout) <= 4 << 20
        assert "space" in result.stderr or "Read-only" in result.stderr, result
        assert await usable(sandbox)

    inside(body, SMALL)


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


def test_the_number_of_files_is_limited(inside):
    async def body(sandbox):
        script = "i=0; while :; do i=$((i+1)); : > n$i || break; done; echo $i"
        result = await sandbox.exec(("sh", "-c", script))
        assert int(result.stdout or 0) <= 1024 or "space" in result.stderr
        await sandbox.exec(("sh", "-c", "rm -f n*"))
        assert await usable(sandbox)

    inside(body, SMALL)


def test_a_flood_of_output_is_cut_and_said(inside):
    async def body(sandbox):
        script = "head -c 60000000 /dev/zero | tr '\\0' x; echo END; echo problem >&2"
        result = await sandbox.exec(("sh", "-c", script))
        assert result.truncated
        assert result.exit_code == 0
        assert result.stdout.startswith("xxx")
        assert result.stdout.endswith("xEND\n")
        assert "of 60000004 bytes left out" in result.stdout
        assert len(result.stdout) < 20_000
        assert result.stderr == "problem\n"

    inside(body)


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
