"""Inspect's local sandbox, in its own environment: a folder and processes of the host, uncontained.

`python inspect_local.py ROUNDS` prints one JSON object: seconds of whole cycles (sandbox, `true`,
clean-up) and of further commands.
"""

import asyncio
import importlib.metadata
import json
import sys
import time

from inspect_ai.util._sandbox.local import LocalSandboxEnvironment


async def main(rounds: int) -> dict:
    cycles, commands = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        made = await LocalSandboxEnvironment.sample_init("bench", None, {})
        for calls in range(2):
            asked = time.perf_counter()
            assert (await made["default"].exec(["true"])).success
            if calls:
                commands.append(time.perf_counter() - asked)
        await LocalSandboxEnvironment.sample_cleanup("bench", None, made, False)
        cycles.append(time.perf_counter() - started - commands[-1])
    return {
        "version": importlib.metadata.version("inspect-ai"), "cycle_s": cycles, "exec_s": commands,
    }  # fmt: skip


print(json.dumps(asyncio.run(main(int(sys.argv[1])))))
