"""Commands that are started before they are asked for."""

import asyncio

import pytest

from posttrain.core.clock import RealClock
from posttrain.core.containment import Cause
from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.pooled import PooledSandboxes
from tests.sandbox.conftest import processes_named

READER = ("sh", "-c", "echo here > started; cat; echo $1 >&2; exit 3", "reader")


def play(machine, body, *, ahead=READER, **fields):
    async def main():
        async with BubblewrapSandboxes() as source:
            async with source.lease(Environment(**fields), ahead=ahead) as sandbox:
                await body(sandbox)
            source.check()
            assert source.stats().open == 0

    asyncio.run(main())


async def until_started(sandbox):
    while await sandbox.read("started", max_bytes=9) is None:
        await asyncio.sleep(0)


def test_it_waits_for_its_input_and_answers_as_any_command(machine):
    async def body(sandbox):
        await until_started(sandbox)
        heard = []
        listen = lambda name, data: heard.append((name, data))  # noqa: E731
        result = await sandbox.exec(READER, stdin=b"given" * 50_000, listen=listen)
        assert (result.exit_code, result.stderr) == (3, "\n")
        assert heard[0][0] == "stdout"
        assert result.truncated
        assert not result.memory_lost
        again = await sandbox.exec(READER, stdin=b"anew")
        assert (again.stdout, again.exit_code) == ("anew", 3)

    play(machine, body)


def test_its_time_begins_with_its_input(machine):
    async def body(sandbox):
        await until_started(sandbox)
        result = await sandbox.exec(("sh", "-c", "echo x > started; exec sleep 9"), timeout_s=0.2)
        assert result.timed_out
        assert 0.2 <= result.duration_s < 5

    play(machine, body, ahead=("sh", "-c", "echo x > started; exec sleep 9"), exec_timeout_s=0.001)


@pytest.mark.parametrize("what", ["other", "kill", "snapshot", "died"])
def test_where_it_is_not_what_is_asked_for_or_is_gone_the_command_is_started(machine, what, marker):
    ahead = ("sh", "-c", "echo here > started; read line; echo $line", marker)

    async def body(sandbox):
        await until_started(sandbox)
        assert processes_named(marker)
        if what == "other":
            assert (await sandbox.exec(("echo", "hi"))).stdout == "hi\n"
        elif what == "kill":
            await sandbox.kill()
        elif what == "snapshot":
            await (await sandbox.snapshot()).close()
        else:
            ended = await sandbox.exec(("sh", "-c", "kill -9 -1; exit 7"))
            assert ended.exit_code in (7, 137)
        while processes_named(marker):
            await asyncio.sleep(0)
        result = await sandbox.exec(ahead, stdin=b"word\n")
        assert (result.stdout, result.exit_code) == ("word\n", 0)

    play(machine, body, ahead=ahead)


def test_one_that_ended_before_its_input_came_is_told_as_it_ended(machine):
    async def body(sandbox):
        await until_started(sandbox)
        result = await sandbox.exec(("sh", "-c", "echo x > started; exit 5"), stdin=b"never read")
        assert (result.exit_code, result.cause) == (5, Cause.EXITED)

    play(machine, body, ahead=("sh", "-c", "echo x > started; exit 5"))


def test_one_that_cannot_be_started_is_told_as_such(machine):
    async def body(sandbox):
        assert (await sandbox.exec(("no-such-program",))).exit_code == 127

    play(machine, body, ahead=("no-such-program",))


def test_over_the_pool_each_lease_has_one_of_its_own(machine):
    ahead = ("sh", "-c", "cat > left; cat left; ls")

    async def main():
        async with BubblewrapSandboxes() as source, PooledSandboxes(source, RealClock()) as pool:
            environment = Environment(files={"given": "x"})
            for word in ("one", "two", "three"):
                async with pool.lease(environment, ahead=ahead) as sandbox:
                    result = await sandbox.exec(ahead, stdin=word.encode())
                    assert result.stdout == f"{word}given\nleft\n"
            async with pool.lease(environment) as sandbox:
                sealed = await sandbox.seal()
            beside = ("sh", "-c", "cat; ls /artefacts")
            async with pool.lease(environment, beside=sealed, ahead=beside) as sandbox:
                assert (await sandbox.exec(beside, stdin=b"in ")).stdout == "in given\n"
            await sealed.close()
            pool.check()
        assert source.stats().open == 0

    asyncio.run(main())
