"""SWE-ReX's local deployment, in its own environment: a bash session on the host, uncontained.

`python swerex_local.py ROUNDS` prints one JSON object: seconds of whole cycles (deployment,
session, `true`, stop) and of commands in a live session.
"""

import asyncio
import importlib.metadata
import json
import logging
import sys
import time

from swerex.deployment.local import LocalDeployment
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest


async def main(rounds: int) -> dict:
    logging.disable(logging.CRITICAL)
    cycles, commands = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        deployment = LocalDeployment()
        await deployment.start()
        await deployment.runtime.create_session(CreateBashSessionRequest())
        for calls in range(2):
            asked = time.perf_counter()
            seen = await deployment.runtime.run_in_session(BashAction(command="true"))
            assert seen.exit_code == 0
            if calls:
                commands.append(time.perf_counter() - asked)
        await deployment.stop()
        cycles.append(time.perf_counter() - started - commands[-1])
    return {
        "version": importlib.metadata.version("swe-rex"), "cycle_s": cycles, "exec_s": commands,
    }  # fmt: skip


print(json.dumps(asyncio.run(main(int(sys.argv[1])))))
