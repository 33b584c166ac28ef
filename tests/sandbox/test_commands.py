"""What a command may do to its own ends, and that the next one does not notice."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.core.errors import SandboxError, UsageError
from posttrain.core.task import Environment
from tests.sandbox.conftest import processes_named


def test_files_and_daemons_stay_from_command_to_command_and_variables_do_not(inside):
    async def body(sandbox):
        assert (await sandbox.exec(("cat", "a/b.txt"))).stdout == "given"
        await sandbox.exec(("sh", "-c", "mkdir d && echo made > d/x && export X=1; sleep 100 &"))
        result = await sandbox.exec(
            ("sh", "-c", "cat d/x; pwd; echo [$X]; ls /proc | grep -c ^[0-9]")
        )
        made, folder, variable, processes = result.stdout.split()
        assert (made, folder, variable) == ("made", "/workspace", "[]")
        assert int(processes) == 5  # The first one, sleep, sh, ls and grep.
        assert await sandbox.read("d/x", max_bytes=100) == b"made\n"
        assert await sandbox.read("/workspace/d/x", max_bytes=2) == b"ma"
        await sandbox.write("e/f", b"\x00\xff")
        assert (await sandbox.exec(("wc", "-c", "e/f"))).stdout == "2 e/f\n"

    inside(body, Environment(files={"a/b.txt": "given"}))


def test_set_up_runs_once_in_the_workspace(inside):
    async def body(sandbox):
        assert (await sandbox.exec(("cat", "log"))).stdout == "one\ntwo\n"

    inside(body, Environment(setup=("echo one >> log", "echo two >> log")))


def test_a_set_up_that_fails_is_not_the_policys_doing(inside, sandboxes):
    async def body(sandbox):
        raise AssertionError("never reached")

    before = sandboxes.stats().closed
    with pytest.raises(SandboxError, match=r"exit 3.* gave 3: why"):
        inside(body, Environment(setup=("echo why >&2; exit 3",)))
    assert sandboxes.stats().closed == before + 1


@pytest.mark.parametrize(
    ("argv", "exit_code"),
    [
        (("sh", "-c", "exit 3"), 3), (("false",), 1), (("sh", "-c", "kill -9 $$"), 137),
        (("sh", "-c", "kill -9 -1; exit 7"), 7), (("no-such-program",), 127), (("/usr",), 126),
        (("sh", "-c", "exec >&- 2>&- <&-; exit 4"), 4), (("a\0b",), 126),
        (("true", "x" * 140_000), 126), (("sh", "-c", "exit 255"), 255),
    ],
)  # fmt: skip
def test_exit_codes_are_told_as_a_shell_does(inside, argv, exit_code):
    async def body(sandbox):
        result = await sandbox.exec(argv)
        assert (result.exit_code, result.timed_out) == (exit_code, False), result
        assert (await sandbox.exec(("echo", "next"))).stdout == "next\n"

    inside(body)


def test_standard_input_is_what_was_given_and_nothing_else(inside):
    async def body(sandbox):
        assert (await sandbox.exec(("cat",))).stdout == ""
        result = await sandbox.exec(("python3", "-c", "input()"))
        assert result.exit_code == 1
        assert "EOFError" in result.stderr
        result = await sandbox.exec(("sh", "-c", "until read x; do :; done"), timeout_s=0.4)
        assert result.timed_out
        assert (await sandbox.exec(("cat",), stdin=b"explicit")).stdout == "explicit"
        big = await sandbox.exec(("wc", "-c"), stdin=bytes(3_000_000))
        assert big.stdout == "3000000\n"
        unread = await sandbox.exec(("true",), stdin=bytes(3_000_000))
        assert unread.exit_code == 0

    inside(body)


HARNESS = """
import asyncio, sys
from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
async def main():
    async with BubblewrapSandboxes() as source, source.lease(Environment()) as sandbox:
        print(repr((await sandbox.exec(("cat",))).stdout))
        asked = await sandbox.exec(("python3", "-c", "input()"))
        print(asked.stderr.splitlines()[-1])
        print(repr((await sandbox.exec(("cat",), stdin=b"explicit")).stdout))
asyncio.run(main())
print(sys.stdin.readline(), end="")
"""


def test_a_command_never_reads_the_standard_input_of_whoever_runs_it_BR_39(machine):
    root = str(Path(__file__).parents[2])
    harness = subprocess.run(
        [sys.executable, "-c", HARNESS], cwd=root, env={"PYTHONPATH": root}, check=True,
        input=b"SECRET-LINE\n", stdout=subprocess.PIPE, timeout=60,
    )  # fmt: skip
    assert harness.stdout.decode().splitlines() == [
        "''", "EOFError: EOF when reading a line", "'explicit'", "SECRET-LINE",
    ]  # fmt: skip


def test_a_pipe_to_a_logger_does_not_hide_the_time_limit(inside, marker):
    """BR-25: `tee` took the kill signal's place, and a time-out looked like a normal end."""

    async def body(sandbox):
        script = f"(echo begun; sleep 60) | tee log; echo ended # {marker}"
        result = await sandbox.exec(("bash", "-c", script), timeout_s=0.5)
        assert (result.exit_code, result.timed_out) == (None, True)
        assert result.stdout == "begun\n"
        assert await sandbox.read("log", max_bytes=99) == b"begun\n"
        assert processes_named(marker) == []

    inside(body)


def test_commands_of_one_sandbox_may_overlap(inside):
    async def body(sandbox):
        results = await asyncio.gather(
            *(sandbox.exec(("sh", "-c", f"echo {i} > f{i}; cat f{i}")) for i in range(6))
        )
        assert [result.stdout for result in results] == [f"{i}\n" for i in range(6)]

    inside(body)


def test_a_cancelled_command_is_killed_and_the_sandbox_stays(inside, marker):
    async def body(sandbox):
        script = f"echo up > up; sleep 60 # {marker}"
        task = asyncio.ensure_future(sandbox.exec(("sh", "-c", script), timeout_s=50))
        while await sandbox.read("up", max_bytes=9) != b"up\n":
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        started = time.monotonic()
        while processes_named(marker):
            assert time.monotonic() - started < 10
            await asyncio.sleep(0)
        assert (await sandbox.exec(("echo", "on"))).stdout == "on\n"

    inside(body)


def test_mistakes_of_the_caller_are_said(inside):
    async def body(sandbox):
        with pytest.raises(UsageError, match="command"):
            await sandbox.exec(())
        with pytest.raises(UsageError, match="time"):
            await sandbox.exec(("true",), timeout_s=0)
        with pytest.raises(UsageError, match="workspace"):
            await sandbox.write("../x", b"")
        assert await sandbox.read("../x", max_bytes=1) is None

    inside(body)


def test_files_outside_the_workspace_are_refused(inside):
    async def body(sandbox):
        raise AssertionError("never reached")

    with pytest.raises(UsageError, match=r"\.\./x"):
        inside(body, Environment(files={"../x": ""}))
