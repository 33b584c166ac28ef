"""Sandboxes: what a lease, a command and an end cost, beside bare processes, bubblewrap and others.

Everything is timed by whoever asks, in milliseconds. Cold: from asking to the end of the first
command, nothing kept. Warm: the same where one is kept warm, and the lease alone. `fork64_ms`: 64
sandboxes over one snapshot, asked for at once, their commands not counted. Kill: a tree of five
processes and its sandbox, until nothing is left. A cycle is lease, `true`, close, from several
tasks at once over the pool, so that every one that is taken is replaced within the time measured.

An idle sandbox has run a command, so its namespaces and processes are there. Its memory is the
larger of two readings, over all that are alive: what the machine's available memory fell by; and
what is counted up, namely the proportional share of every process of ours (this one and the holder
included), what lies in tmpfs, and the kernel's page tables, stacks, slabs and percpu memory.
"""

import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench import _beside, _peers
from posttrain.core.clock import RealClock
from posttrain.core.containment import Sandbox, Sandboxes
from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.drivers import probe
from posttrain.sandbox.pooled import PooledSandboxes

FORKS = 64
WORKERS = 4
WINDOW_S = 10.0
"""Length of the parts of which the slowest is told."""
TRUE = ("/bin/true",)
GOALS = {
    "cold_ms_p50": 20.0, "warm_lease_ms_p50": 5.0, "exec_ms_p50": 3.0, "fork64_ms": 100.0,
    "kill_ms_p50": 5.0, "idle_mib_each": 10.0,
}  # fmt: skip
"""At most."""
LEAST = {"cycles_per_s": 100.0, "idle_alive": 1000}


def main(quick: bool) -> dict[str, Any]:
    """All of it; the peers first, while nothing of ours runs."""
    rounds = 20 if quick else 200
    abilities = asyncio.run(probe("bubblewrap")).abilities
    if abilities is None:
        raise SystemExit("no sandbox works here; next: posttrain doctor")
    found: dict[str, Any] = {
        "bubblewrap": f"{abilities.version} ({abilities.source})",
        "limits": abilities.capabilities.limits,
    }
    beside = _others(abilities.source, rounds=rounds)
    found |= asyncio.run(
        _measure(rounds=rounds, seconds=6.0 if quick else 60.0, idle=200 if quick else 1000)
    )
    found |= beside | _ratios(found | beside)
    missed = [
        *(name for name, most in GOALS.items() if found[name] > most),
        *(name for name, least in LEAST.items() if found[name] < least),
    ]
    return found | {"goals_missed": None if quick else missed}


def _others(source: str, *, rounds: int) -> dict[str, Any]:
    """What others need for a whole cycle (made, `true`, ended) and for a further command."""
    found: dict[str, Any] = _ms("process", _beside.timed(rounds, _beside.process))
    found |= _ms("bubblewrap", _beside.bubblewrap(source, rounds=rounds))
    versions = {}
    for program in ("runc", "crun", "podman"):
        taken = _beside.container(program, rounds=rounds // 10)
        found |= _ms(program, taken)
        if taken is not None:
            told = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
            versions[program] = told.splitlines()[0].split()[-1]
    for name, count in (("swerex", max(3, rounds // 20)), ("inspect", rounds)):
        seen = _peers.ask(name, f"{name}_local.py", str(count))
        found |= _ms(f"{name}_cycle", seen and seen["cycle_s"])
        found |= _ms(f"{name}_exec", seen and seen["exec_s"])
        if seen is not None:
            versions[name] = seen["version"]
    return found | {"peers": versions}


def _ratios(found: dict[str, Any]) -> dict[str, Any]:
    """How many times as long others take; a warm lease for whole cycles, a command for commands."""
    pairs = {
        "bubblewrap_over_cold": ("bubblewrap_ms_p50", "cold_ms_p50"),
        "bubblewrap_over_warm": ("bubblewrap_ms_p50", "warm_ms_p50"),
        "bubblewrap_over_exec": ("bubblewrap_ms_p50", "exec_ms_p50"),
        "process_over_exec": ("process_ms_p50", "exec_ms_p50"),
        "runc_over_cold": ("runc_ms_p50", "cold_ms_p50"),
        "crun_over_cold": ("crun_ms_p50", "cold_ms_p50"),
        "podman_over_cold": ("podman_ms_p50", "cold_ms_p50"),
        "swerex_over_warm": ("swerex_cycle_ms_p50", "warm_cycle_ms_p50"),
        "swerex_over_exec": ("swerex_exec_ms_p50", "exec_ms_p50"),
        "inspect_over_warm": ("inspect_cycle_ms_p50", "warm_cycle_ms_p50"),
        "inspect_over_exec": ("inspect_exec_ms_p50", "exec_ms_p50"),
    }
    return {
        name: None if found[theirs] is None else round(found[theirs] / found[ours], 2)
        for name, (theirs, ours) in pairs.items()
    }


async def _measure(*, rounds: int, seconds: float, idle: int) -> dict[str, Any]:
    async with BubblewrapSandboxes() as source:
        await _cold(source)
        result = _ms("cold", [await _cold(source) for _ in range(rounds)])
        result |= await _warm(source, rounds)
        async with source.lease(Environment()) as sandbox:
            result |= _ms("exec", [await _exec(sandbox) for _ in range(rounds)])
        result |= await _fork(source, rounds=max(5, rounds // 10))
        result |= _ms("kill", [await _kill(source) for _ in range(max(5, rounds // 4))])
        result |= await _cycles(source, seconds)
        result |= await _idle(source, idle)
        source.check()
    return result


def _ms(name: str, seconds: list[float] | None) -> dict[str, float | None]:
    """Median and 95th percentile in milliseconds."""
    if seconds is None:
        return {f"{name}_ms_p50": None, f"{name}_ms_p95": None}
    return {
        f"{name}_ms_p50": round(statistics.median(seconds) * 1e3, 2),
        f"{name}_ms_p95": round(statistics.quantiles(seconds, n=20)[-1] * 1e3, 2),
    }


async def _seconds(call: Awaitable[object]) -> float:
    started = time.perf_counter()
    await call
    return time.perf_counter() - started


async def _cold(source: Sandboxes) -> float:
    """Lay a file, run the first command; seconds until the command's end."""
    started = time.perf_counter()
    async with source.lease(Environment(files={"a.txt": "a"})) as sandbox:
        assert (await sandbox.exec(TRUE)).exit_code == 0
        return time.perf_counter() - started


async def _exec(sandbox: Sandbox) -> float:
    return await _seconds(sandbox.exec(TRUE))


async def _warm(source: BubblewrapSandboxes, rounds: int) -> dict[str, Any]:
    """Leases that find a warm sandbox, one after the other, nothing being made meanwhile."""
    leases, firsts, cycles = [], [], []
    async with PooledSandboxes(source, RealClock()) as pool:
        while not pool.stats().idle:
            await _cold(pool)
        before = pool.stats().found_warm
        for _ in range(rounds):
            while not pool.stats().idle or pool.stats().warming:
                await asyncio.sleep(0.001)
            started = time.perf_counter()
            async with pool.lease(Environment(files={"a.txt": "a"})) as sandbox:
                leases.append(time.perf_counter() - started)
                assert (await sandbox.exec(TRUE)).exit_code == 0
                firsts.append(time.perf_counter() - started)
            cycles.append(time.perf_counter() - started)
        assert pool.stats().found_warm - before == rounds
        pool.check()
    return _ms("warm_lease", leases) | _ms("warm", firsts) | _ms("warm_cycle", cycles)


async def _fork(source: BubblewrapSandboxes, *, rounds: int) -> dict[str, Any]:
    """Snapshots of sandboxes in which a command has run, and many that go on from each."""
    snapshots, forks = [], []
    for number in range(rounds):
        async with AsyncExitStack() as stack:
            parent = await stack.enter_async_context(source.lease(Environment()))
            await parent.exec(TRUE)
            await parent.write("file", b"%d" % number)
            started = time.perf_counter()
            snapshot = await parent.snapshot()
            snapshots.append(time.perf_counter() - started)
            stack.push_async_callback(snapshot.close)
            leases = [source.lease(Environment(), over=snapshot) for _ in range(FORKS)]
            started = time.perf_counter()
            made = await asyncio.gather(*map(stack.enter_async_context, leases))
            forks.append(time.perf_counter() - started)
            assert await made[-1].read("file", max_bytes=9) == b"%d" % number
    told = _ms("fork64", forks)
    return _ms("snapshot", snapshots) | {
        "fork64_ms": told["fork64_ms_p50"], "fork64_ms_p95": told["fork64_ms_p95"],
    }  # fmt: skip


async def _kill(source: BubblewrapSandboxes) -> float:
    """From asking a sandbox with a tree of five processes to close, until nothing is left."""
    async with source.lease(Environment()) as sandbox:
        script = "for i in 1 2 3 4; do sleep 60 & done; echo up > up; wait"
        running = asyncio.ensure_future(sandbox.exec(("sh", "-c", script), timeout_s=50))
        while await sandbox.read("up", max_bytes=3) != b"up\n":
            await asyncio.sleep(0)
        taken = await _seconds(sandbox.close())
        assert (await running).exit_code is None
    return taken


async def _cycles(source: BubblewrapSandboxes, seconds: float) -> dict[str, Any]:
    """Lease, `true`, close over a pool, from several tasks at once; those kept warm in the end were
    started within the time as well.
    """
    ends: list[float] = []
    taken: list[float] = []

    async def work(pool: PooledSandboxes, until: float) -> None:
        while (started := time.perf_counter()) < until:
            async with pool.lease(Environment()) as sandbox:
                assert (await sandbox.exec(TRUE)).exit_code == 0
            ends.append(time.perf_counter())
            taken.append(ends[-1] - started)

    async with PooledSandboxes(source, RealClock()) as pool:
        await _cold(pool)
        started, kernel_mib = time.perf_counter(), _kernel_mib()
        await asyncio.gather(*(work(pool, started + seconds) for _ in range(WORKERS)))
        whole_s = time.perf_counter() - started
        grown_mib = _kernel_mib() - kernel_mib
        assert pool.stats().started >= len(ends), "each was a fresh one"
    window_s = min(WINDOW_S, seconds / 3)
    windows = [0] * int(seconds / window_s)
    for end in ends:
        if end - started < window_s * len(windows):
            windows[int((end - started) / window_s)] += 1
    return {
        "cycles_per_s": round(len(ends) / whole_s, 1),
        "cycles_per_s_slowest": round(min(windows) / window_s, 1),
        "cycles_kernel_mib": round(grown_mib, 1),
        **_ms("cycle", taken),
    }


# --- idle ones --------------------------------------------------------------------------------


async def _idle(source: BubblewrapSandboxes, count: int) -> dict[str, Any]:
    """Keep many alive at once, weigh them, and prove that each works."""
    async with AsyncExitStack() as stack:
        before = _Memory()
        made: list[Sandbox] = []
        for _ in range(count):
            made.append(await stack.enter_async_context(source.lease(Environment())))
            assert (await made[-1].exec(TRUE)).exit_code == 0
        after = _Memory()
        alive = sum([(await sandbox.exec(TRUE)).exit_code == 0 for sandbox in made])
        crowded = [await _exec(made[-1]) for _ in range(20)]
    fallen = (before.available_mib - after.available_mib) / count
    processes = (after.processes_mib - before.processes_mib) / count
    counted = processes + (after.kernel_mib - before.kernel_mib) / count
    return {
        "idle_alive": alive,
        "idle_mib_each": round(max(fallen, counted), 2),
        "idle_mib_each_available": round(fallen, 2),
        "idle_mib_each_counted": round(counted, 2),
        "idle_mib_each_processes": round(processes, 2),
        **_ms("exec_among_idle", crowded),
    }


class _Memory:
    """What is used now, in MiB."""

    def __init__(self) -> None:
        fields = _meminfo_mib()
        self.available_mib = fields["MemAvailable"]
        self.kernel_mib = _kernel_mib() + fields["Shmem"]
        self.processes_mib = sum(map(_share_mib, (os.getpid(), *_below(os.getpid()))))


def _kernel_mib() -> float:
    """What the kernel holds that it cannot give back at once."""
    fields = _meminfo_mib()
    return sum(fields[name] for name in ("PageTables", "KernelStack", "SUnreclaim", "Percpu"))


def _meminfo_mib() -> dict[str, float]:
    with open("/proc/meminfo") as file:
        lines = [line.split() for line in file]
    return {words[0].rstrip(":"): int(words[1]) / 1024 for words in lines}


def _share_mib(pid: int) -> float:
    """A process's proportional share of the memory it uses (proc(5))."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("Pss:")]
    return int(line.split()[1]) / 1024


def _below(pid: int) -> list[int]:
    """A process's descendants."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
            found += [int(child), *_below(int(child))]
    return found
