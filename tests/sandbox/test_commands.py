"""What is the harness's own stays its own."""

import subprocess
import sys
from pathlib import Path

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
