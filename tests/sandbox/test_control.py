"""Causes of death, freezing, use, output as it comes, and killing without losing files."""

import asyncio

import pytest

from posttrain.core.containment import Cause
from posttrain.core.task import Environment
from tests.sandbox.conftest import processes_named


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("exit 3", Cause.EXITED),
        ("kill -SEGV $$", Cause.SIGNALLED),
        ("sleep 60", Cause.TIMED_OUT),
    ],
)
def test_what_ended_a_command_is_told(inside, line, cause):
    async def body(sandbox):
        result = await sandbox.exec(("sh", "-c", line), timeout_s=0.5)
        assert result.cause is cause
        assert not result.out_of_memory
        assert not result.disk_full

    inside(body)


def test_a_tree_that_takes_too_much_memory_is_told_from_one_that_is_killed(inside, machine):
    if not machine.cgroups:
        pytest.skip("no control groups can be made here")
    hungry = "python3 -c 'x = bytearray(60 << 20); import time; time.sleep(30)'"

    async def body(sandbox):
        result = await sandbox.exec(("bash", "-c", f"{hungry} & {hungry} & wait -n; exit 9"))
        assert result.cause is Cause.OUT_OF_MEMORY, result
        await sandbox.kill()
        result = await sandbox.exec(("sh", "-c", "kill -9 $$"))
        assert result.cause is Cause.SIGNALLED

    inside(body, Environment(memory_bytes=96 << 20))


def test_a_full_disk_is_told_until_there_is_room(inside):
    async def body(sandbox):
        result = await sandbox.exec(("sh", "-c", "head -c 9000000 /dev/zero > big"))
        assert result.disk_full
        result = await sandbox.exec(("sh", "-c", "rm big"))
        assert not result.disk_full

    inside(body, Environment(disk_bytes=4 << 20))


def test_output_is_heard_while_the_command_runs_and_only_up_to_its_cap(inside):
    async def body(sandbox):
        heard = asyncio.Queue()
        script = "echo first; read go; echo second >&2; head -c 500 /dev/zero"
        fifo = await sandbox.exec(("mkfifo", "gate"))
        assert fifo.exit_code == 0
        running = asyncio.ensure_future(
            sandbox.exec(
                ("sh", "-c", script.replace("read go", "read go < gate")),
                listen=lambda name, data: heard.put_nowait((name, data)),
            )
        )
        assert await heard.get() == ("stdout", b"first\n")
        assert not running.done()
        await sandbox.exec(("sh", "-c", "echo > gate"))
        result = await running
        assert result.stderr == "second\n"
        rest = [heard.get_nowait() for _ in range(heard.qsize())]
        assert ("stderr", b"second\n") in rest
        told = b"".join(data for name, data in rest if name == "stdout")
        assert told == bytes(100 - len("first\n"))
        assert result.truncated

    inside(body, Environment(max_output_bytes=100))


def test_frozen_time_does_not_count_and_nothing_moves(inside, marker):
    count = f"i=0; while :; do i=$((i+1)); echo $i > n; done # {marker}"

    async def body(sandbox):
        running = asyncio.ensure_future(sandbox.exec(("sh", "-c", count), timeout_s=1.0))
        while not await sandbox.read("n", max_bytes=9):
            await asyncio.sleep(0)
        await sandbox.freeze()
        before = await sandbox.read("n", max_bytes=20)
        _, pending = await asyncio.wait([running], timeout=1.3)
        assert pending, "the limit ran on"
        assert await sandbox.read("n", max_bytes=20) == before
        waiting = asyncio.ensure_future(sandbox.exec(("true",)))
        _, pending = await asyncio.wait([waiting], timeout=0.1)
        assert pending, "a command ran in a frozen sandbox"
        await sandbox.thaw()
        assert (await waiting).exit_code == 0
        while await sandbox.read("n", max_bytes=20) == before:
            await asyncio.sleep(0)
        result = await running
        assert result.timed_out
        assert 0.9 < result.duration_s < 5

    inside(body)


def test_a_frozen_sandbox_can_be_killed_and_closed(inside, marker):
    async def body(sandbox):
        running = asyncio.ensure_future(sandbox.exec(("sh", "-c", f"sleep 60 # {marker}")))
        while not processes_named(marker):
            await asyncio.sleep(0)
        await sandbox.freeze()
        await sandbox.kill()
        assert (await running).cause is Cause.KILLED
        assert processes_named(marker) == []
        assert (await sandbox.exec(("echo", "again"))).stdout == "again\n"
        await sandbox.freeze()

    inside(body)


def test_a_command_that_waits_for_a_thaw_has_all_its_time_and_can_be_killed(inside):
    async def body(sandbox):
        await sandbox.freeze()
        waiting = asyncio.ensure_future(sandbox.exec(("echo", "ran"), timeout_s=0.2))
        _, pending = await asyncio.wait([waiting], timeout=0.3)
        assert pending
        await sandbox.thaw()
        assert (await waiting).stdout == "ran\n"
        await sandbox.freeze()
        waiting = asyncio.ensure_future(sandbox.exec(("sh", "-c", "echo > made")))
        await asyncio.wait([waiting], timeout=0.05)
        await sandbox.kill()
        assert (await waiting).cause is Cause.KILLED
        assert await sandbox.read("made", max_bytes=1) is None

    inside(body)


def test_use_is_told(inside, machine):
    async def body(sandbox):
        await sandbox.exec(("sh", "-c", "head -c 3000000 /dev/zero > big; sleep 60 &"))
        usage = await sandbox.usage()
        assert 3_000_000 <= usage.disk_bytes < 4_000_000
        if machine.cgroups:
            assert usage.processes == 1
            assert usage.memory_bytes > 3_000_000

    inside(body)
