"""Sandboxes: what a lease, a command and an end cost, beside bare processes and bare bubblewrap.

A warm lease is counted from the asking to the end of its first command. `fork64_ms` is 64 sandboxes
over one snapshot, asked for at once, their first commands not counted. An idle sandbox has run a
command, so its namespaces are live; its memory is what the machine's free memory fell by.
"""

import asyncio
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from posttrain.core.clock import RealClock
from posttrain.core.containment import Sandbox, Sandboxes
from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.pooled import PooledSandboxes

MOST_IDLE = 1000
FORKS = 64
TRUE = ("/bin/true",)


def main(quick: bool) -> dict[str, Any]:
    """Medians in milliseconds over `rounds` calls, cycles a second on all cores, idle cost."""
    return asyncio.run(_measure(rounds=20 if quick else 200, seconds=3.0 if quick else 20.0))


async def _measure(*, rounds: int, seconds: float) -> dict[str, Any]:
    async with BubblewrapSandboxes() as source:
        abilities = await source.abilities()
        result = {
            "bubblewrap": f"{abilities.version} ({abilities.source})",
            "limits": abilities.limits,
            "process_ms_p50": await _median_ms(rounds, _bare_process),
            "cold_ms_p50": await _median_ms(rounds, lambda: _lease(source)),
            **await _warm(source, rounds),
        }
        async with source.lease(Environment()) as sandbox:
            result["exec_ms_p50"] = await _median_ms(rounds, lambda: sandbox.exec(TRUE))
            result |= await _fork(source, sandbox)
        result["kill_ms_p50"] = await _kill_ms(source, rounds=max(5, rounds // 4))
        result["cycles_per_s"] = await _cycles_per_s(source, seconds)
        result |= await _idle(source)
        source.check()
    return result


async def _median_ms(rounds: int, call: Callable[[], Awaitable[object]]) -> float:
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - started)
    return round(statistics.median(taken) * 1e3, 2)


async def _bare_process() -> None:
    subprocess.run(TRUE, check=True)


async def _lease(source: Sandboxes) -> float:
    """Lease, lay a file, run the first command, let go; seconds until the command's end."""
    started = time.perf_counter()
    async with source.lease(Environment(files={"a.txt": "a"})) as sandbox:
        assert (await sandbox.exec(TRUE)).exit_code == 0
        return time.perf_counter() - started


async def _warm(source: BubblewrapSandboxes, rounds: int) -> dict[str, Any]:
    """Leases that find a warm sandbox, one after the other."""
    async with PooledSandboxes(source, RealClock()) as pool:
        while not pool.stats().idle:
            await _lease(pool)
        before, taken = pool.stats().found_warm, []
        for _ in range(rounds):
            while not pool.stats().idle or pool.stats().warming:
                await asyncio.sleep(0.001)
            taken.append(await _lease(pool))
        assert pool.stats().found_warm - before == rounds
        pool.check()
    return {
        "warm_ms_p50": round(statistics.median(taken) * 1e3, 2),
        "warm_ms_p95": round(statistics.quantiles(taken, n=20)[-1] * 1e3, 2),
    }


async def _fork(source: BubblewrapSandboxes, parent: Sandbox) -> dict[str, Any]:
    """A snapshot of a sandbox, and many that go on from it."""
    await parent.write("file", b"x" * 1000)
    started = time.perf_counter()
    snapshot = await parent.snapshot()
    sealed = time.perf_counter()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(snapshot.close)
        leases = [source.lease(Environment(), over=snapshot) for _ in range(FORKS)]
        forks = await asyncio.gather(*map(stack.enter_async_context, leases))
        forked = time.perf_counter()
        assert await forks[-1].read("file", max_bytes=1) == b"x"
    return {
        "snapshot_ms": round((sealed - started) * 1e3, 2),
        "fork64_ms": round((forked - sealed) * 1e3, 2),
    }


async def _kill_ms(source: BubblewrapSandboxes, *, rounds: int) -> float:
    """From asking a sandbox with a tree of five processes to close, until nothing is left."""
    taken = []
    for _ in range(rounds):
        async with source.lease(Environment()) as sandbox:
            script = "for i in 1 2 3 4; do sleep 60 & done; echo up > up; wait"
            running = asyncio.ensure_future(sandbox.exec(("sh", "-c", script), timeout_s=50))
            while await sandbox.read("up", max_bytes=3) != b"up\n":
                await asyncio.sleep(0)
            started = time.perf_counter()
            await sandbox.close()
            taken.append(time.perf_counter() - started)
            assert (await running).exit_code is None
    return round(statistics.median(taken) * 1e3, 2)


async def _cycles_per_s(source: BubblewrapSandboxes, seconds: float) -> float:
    """Lease, `true`, close, from four tasks at once."""
    until = time.perf_counter() + seconds

    async def work() -> int:
        cycles = 0
        while time.perf_counter() < until:
            await _lease(source)
            cycles += 1
        return cycles

    started = time.perf_counter()
    cycles = sum(await asyncio.gather(*(work() for _ in range(4))))
    return round(cycles / (time.perf_counter() - started), 1)


async def _idle(source: BubblewrapSandboxes) -> dict[str, Any]:
    """Keep many alive at once, and prove that the last one works."""
    before = _available_mib()
    async with AsyncExitStack() as stack:
        for _ in range(MOST_IDLE):
            sandbox = await stack.enter_async_context(source.lease(Environment()))
            assert (await sandbox.exec(TRUE)).exit_code == 0
        each = (before - _available_mib()) / MOST_IDLE
        alive = source.stats().open
        crowded = await _median_ms(10, lambda: sandbox.exec(TRUE))
    return {
        "idle_alive": alive,
        "idle_mib_each": round(max(each, 0.0), 3),
        "exec_among_idle_ms_p50": crowded,
    }


def _available_mib() -> float:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) / 1024
