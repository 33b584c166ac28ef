from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
import torch

from posttrain.core.errors import EngineError, PreflightError
from posttrain.engine import threads
from posttrain.engine.model import load
from tests.engine.asking import ask, engine

PROGRAM = """
import os, sys
from posttrain.engine import threads
print(threads.configure(), os.environ.get("POSTTRAIN_COMPUTE_THREADS"),
      os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules, os.environ.get("OMP_NUM_THREADS"))
"""


def configured(**environment: str) -> list[str]:
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "POSTTRAIN_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**kept, **environment}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


def test_threads_and_spinning_are_set_before_torch():
    cores = str(threads.cores())
    assert configured() == ["True", cores, threads.SPIN_COUNT, "False", "1"]


def test_what_a_person_has_set_stays():
    assert configured(OMP_NUM_THREADS="1", GOMP_SPINCOUNT="7")[1:3] == ["1", "7"]
    assert configured(OMP_WAIT_POLICY="PASSIVE")[2] == "None"


PARALLEL = """
import threading
from posttrain.engine import threads
threads.configure()
import torch
torch.get_num_threads()
found = []
def compute():
    threads.take_cores()
    found.append(torch.get_num_threads())
thread = threading.Thread(target=compute)
thread.start(); thread.join()
print(torch.get_num_threads(), found[0])
"""


def test_the_first_of_a_list_of_threads_counts(monkeypatch):
    monkeypatch.setenv(threads.COMPUTE_THREADS, " 2 , 1")
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    threads.take_cores()
    assert set_to == [2]


@pytest.mark.parametrize("wanted", ["many", "1.5", "0", "-2", ",2", "2x", "1e3"])
def test_a_malformed_number_of_threads_reaches_whoever_waits_for_the_engine(
    wanted, tiny, monkeypatch
):
    """It ended the compute thread before anything was read: a sampler waited for ever."""
    monkeypatch.setenv(threads.COMPUTE_THREADS, wanted)
    with engine(load(tiny, dtype=torch.float32)) as running:
        # the thread may have ended before the request is posted, or after
        for _ in range(2):
            with pytest.raises(EngineError, match=f"OMP_NUM_THREADS .* got '{wanted}'"):
                asyncio.run(asyncio.wait_for(running.sample(ask([1, 2])), 60))
            running._thread.join(60)


def test_one_thread_computes_in_parallel_and_no_other():
    """Two teams of GNU OpenMP stop each other's spinning: every parallel region of the compute
    thread then cost a wake-up by the kernel.
    """
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "POSTTRAIN_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", PARALLEL], env={**kept, "OMP_NUM_THREADS": "2"}, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "2"]


def test_after_torch_nothing_is_changed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", object())
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert threads.configure() is False
    assert "GOMP_SPINCOUNT" not in os.environ


def test_cores_are_those_this_process_may_use(monkeypatch):
    assert 1 <= threads.cores() <= len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert threads.cores() == 1


def test_both_slowdowns_are_measured_in_processes_of_their_own():
    found = threads.measure(seconds=0.05)
    assert found.idle_ms > 0
    assert found.busy_ms > 0
    assert found.ratio == found.busy_ms / found.idle_ms
    assert found.threads >= 1


def test_a_torch_that_cannot_run_is_a_preflight_error(monkeypatch):
    monkeypatch.setattr(threads, "_PROGRAM", "raise SystemExit(1)")
    with pytest.raises(PreflightError, match="torch cannot be run"):
        threads.measure(seconds=0.01)
