"""Threads and memory of the numerical libraries. Imports no torch.

GNU OpenMP keeps a team of threads for every thread that ever ran a parallel region, and once all
teams together have more threads than there are cores, none waits by spinning any more: every
region then wakes its threads through the kernel (squares of 128 × 576 numbers: 67 instead of 6 µs).
So one thread computes in parallel, the engine's compute thread; all others have one thread each.
Spinning has its own price: beside one busy process it made torch 11 to 40 times slower on two
cores, so the spin is short.

And glibc gives large freed pieces back to the system, so that every temporary tensor of some
100 KiB and more is paid for in page faults (a norm over 512 × 576 numbers: 1.5 instead of 0.2 ms);
kept memory removes that. The one thing that must stay true: threads and spinning are set before
torch is imported, or not at all.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.errors import EngineError, PreflightError

COMPUTE_THREADS = "POSTTRAIN_COMPUTE_THREADS"
"""Environment name that carries the compute thread's number of threads to `take_cores`."""
SPIN_COUNT = "10000"
"""Turns of GNU OpenMP's waiting loop before a thread sleeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """One linear layer timed in a process of its own: alone, and beside one busy process."""

    threads: int
    idle_ms: float
    busy_ms: float

    @property
    def ratio(self) -> float:
        """How many times slower beside a busy neighbour; 2 is what fair sharing can cost."""
        return self.busy_ms / self.idle_ms


def cores() -> int:
    """Cores this process may use: its affinity, further limited by a cgroup's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        limit = max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max": no quota
        limit = allowed or 1
    return min(allowed or 1, limit)


def configure() -> bool:
    """Keep freed memory, and set threads and spinning for torch, which must not be imported yet.

    `OMP_NUM_THREADS` as a person has set it, otherwise the cores there are, is what the compute
    thread will take; everything else gets one. False: torch was imported already, and its threads
    stay as they are.
    """
    _keep_freed_memory()
    if "torch" in sys.modules:
        return False
    os.environ.setdefault(COMPUTE_THREADS, os.environ.get("OMP_NUM_THREADS") or str(cores()))
    os.environ["OMP_NUM_THREADS"] = "1"
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ.pop("OPENBLAS_CORETYPE", None)  # a fixed core type slows NumPy's products
    return True


def wanted() -> int | None:
    """How many threads `configure` found for computing; None where it was not called. Of a list, as
    OpenMP allows it (one number a level of nesting), the first counts.

    Raises:
        EngineError: what a person has set is no number of threads.
    """
    wanted = os.environ.get(COMPUTE_THREADS)
    if not wanted:
        return None
    first = wanted.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        raise EngineError(
            f"OMP_NUM_THREADS wants a whole number of threads, got {wanted!r}.",
            "unset it, or set it to the number of cores to compute with",
        )
    return int(first)


def take_cores() -> None:
    """Let the calling thread, and no other, compute with all threads that are `wanted`.

    Raises:
        EngineError: as `wanted`.
    """
    import torch

    if (number := wanted()) is not None:
        torch.set_num_threads(number)


def _keep_freed_memory() -> None:
    """Let glibc's allocator reuse what is freed, from one arena; elsewhere nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return
    for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        mallopt(option, 2**31 - 1)
    mallopt(_ARENA_MAX, 1)


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Names of glibc's options (malloc.h)."""


def measure(*, seconds: float = 1.0) -> Slowdown:
    """Time a small linear layer in a fresh process under this process's environment: `seconds`
    alone, then `seconds` beside a busy loop.

    Raises:
        PreflightError: torch cannot be run.
    """
    idle = _probe(seconds)
    busy_loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        busy = _probe(seconds)
    finally:
        busy_loop.kill()
        busy_loop.wait()
    return Slowdown(threads=int(idle["threads"]), idle_ms=idle["ms"], busy_ms=busy["ms"])


_PROGRAM = """
import json, sys, time
import torch
x, w = torch.ones(32, 576, dtype=torch.bfloat16), torch.ones(3072, 576, dtype=torch.bfloat16)
def run(seconds):
    begun, calls = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        torch.nn.functional.linear(x, w)
        calls += 1
    return (time.perf_counter() - begun) / calls * 1e3
with torch.inference_mode():
    run(0.1)
    print(json.dumps({"threads": torch.get_num_threads(), "ms": run(float(sys.argv[1]))}))
"""


def _probe(seconds: float) -> dict[str, float]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(seconds)],
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get(COMPUTE_THREADS, str(cores()))},
            capture_output=True, text=True, check=True, timeout=60 + 10 * seconds,
        )  # fmt: skip
        found: dict[str, float] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise PreflightError(
            f"torch cannot be run in a process of its own: {error}.", "install posttrain again"
        ) from error
    return found
