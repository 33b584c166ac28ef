"""`posttrain doctor`: what this machine has, what is missing, and the next step for each.

The one thing that must stay true: it changes nothing on the machine, and exits with 3 exactly when
something that training needs is missing.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli import runs
from posttrain.core.errors import PosttrainError

WANTED_DISK_GIB = 4.0
"""A run keeps two checkpoints of a small model with its optimiser, and the report."""

SLOW_BESIDE_NEIGHBOUR = 4.0
"""A linear layer that becomes this many times slower beside one busy process: threads spin."""


class Status(StrEnum):
    """How a check went."""

    OK = "ok"
    WARNING = "warning"
    """It works, and something about it is worth a person's time."""
    PROBLEM = "problem"
    """Training cannot work like this."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table."""

    name: str
    status: Status
    found: str
    next_step: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Check this machine: one table, and how to mend each problem."""
    findings = [finding for check in CHECKS for finding in _found(check)]
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _show(findings)
    if any(finding.status is Status.PROBLEM for finding in findings):
        raise typer.Exit(3)


def _found(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The check's findings; an error of ours becomes one."""
    name = check.__name__.removeprefix("check_").replace("_", " ")
    try:
        yield from check()
    except PosttrainError as error:
        yield Finding(name, Status.PROBLEM, error.message, error.next_step)
    except OSError as error:
        yield Finding(name, Status.PROBLEM, str(error))


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {Status.OK: "green", Status.WARNING: "yellow", Status.PROBLEM: "bold red"}
    drawn = Table(title="posttrain doctor", title_justify="left")
    for name in ("check", "", "found", "next step"):
        drawn.add_column(name, overflow="fold")
    for finding in findings:
        drawn.add_row(
            Text(finding.name),
            Text(finding.status, style=styles[finding.status]),
            Text(finding.found),
            Text(finding.next_step),
        )
    Console().print(drawn)


def check_python() -> Iterator[Finding]:
    """The interpreter."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("python", Status.OK, f"{found}, {sys.executable}")


def check_torch() -> Iterator[Finding]:
    """Torch and what it computes on."""
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", Status.PROBLEM, str(error), "make setup")
        return
    device = "CPU (a GPU is here, but not used yet)" if torch.cuda.is_available() else "CPU"
    yield Finding("torch", Status.OK, f"{torch.__version__}, {device}")


def check_threads() -> Iterator[Finding]:
    """Threads alone and beside a busy process."""
    from posttrain.engine import threads

    slowdown = threads.measure(seconds=0.5)
    found = (
        f"{slowdown.threads} of {threads.cores()} cores; one linear layer {slowdown.idle_ms:.2g} ms"
        f" alone, {slowdown.busy_ms:.2g} ms beside a busy process ({slowdown.ratio:.1f} ×)"
    )
    if slowdown.threads > threads.cores():
        step = f"OMP_NUM_THREADS={threads.cores()}"
        yield Finding("threads", Status.WARNING, found, step)
    elif slowdown.ratio > SLOW_BESIDE_NEIGHBOUR:
        step = "stop other work while training, or set OMP_WAIT_POLICY=PASSIVE"
        yield Finding("threads", Status.WARNING, found, step)
    else:
        yield Finding("threads", Status.OK, found)


def check_sandbox() -> Iterator[Finding]:
    """Every driver, tried out. One that works is enough."""
    import asyncio

    from posttrain.sandbox import drivers

    probes = {name: asyncio.run(drivers.probe(name)) for name in drivers.DRIVERS}
    works = [name for name, probe in probes.items() if probe.abilities is not None]
    for name, probe in probes.items():
        able = probe.abilities
        if able is None:
            yield Finding(
                f"sandbox: {name}",
                Status.WARNING if works else Status.PROBLEM,
                probe.problem or "no sandbox can be made so here",
                f"none needed while {works[0]} works" if works else _WITHOUT_SANDBOXES,
            )
            continue
        can = able.capabilities
        user = "a subordinate user" if able.uid is None else f"user {able.uid}"
        found = (
            f"{'chosen by auto; ' if name == works[0] else ''}{able.path} {able.version} "
            f"({able.source}, sha256 {able.sha256[:16]}) as {user}; isolation {can.isolation}; "
            f"seccomp {'on' if able.seccomp else 'off'}; limits for each {can.limits}; processor "
            f"time {'' if can.cores else 'not '}limited; snapshots are {can.snapshots}; "
            f"network: {', '.join(sorted(can.reach))}"
            f"{'' if can.freezes else '; cannot freeze'}"
        )
        yield Finding(f"sandbox: {name}", Status.OK, found)


_WITHOUT_SANDBOXES = "train on answer domains only, or mend this first"


def check_models() -> Iterator[Finding]:
    """The model cache."""
    from posttrain.engine import models

    names = [model.name for model in models.ls()]
    if names:
        found = f"{', '.join(names)} in {models.cache_dir()}"
        yield Finding("models", Status.OK, found)
    else:
        yield Finding(
            "models",
            Status.WARNING,
            f"no model in {models.cache_dir()}",
            "posttrain models fetch smollm2-135m",
        )


def check_disk() -> Iterator[Finding]:
    """Space where runs are written."""
    place = _nearest_existing(runs.root())
    free_gib = shutil.disk_usage(place).free / 2**30
    found = f"{free_gib:.1f} GiB free at {place.resolve()}"
    enough = free_gib >= WANTED_DISK_GIB
    yield Finding(
        "disk",
        Status.OK if enough else Status.PROBLEM,
        found,
        "" if enough else f"free space: a run wants {WANTED_DISK_GIB:.0f} GiB",
    )


def check_runs() -> Iterator[Finding]:
    """Write access to the folder of runs."""
    root = runs.root()
    place = _nearest_existing(root)
    if os.access(place, os.W_OK | os.X_OK) and place.is_dir():
        yield Finding("runs folder", Status.OK, f"{root} can be written")
    else:
        yield Finding(
            "runs folder",
            Status.PROBLEM,
            f"{root} cannot be written (no write access to {place})",
            f"chmod u+wx {place}, or set POSTTRAIN_RUNS to another folder",
        )


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_torch,
    check_threads,
    check_sandbox,
    check_models,
    check_disk,
    check_runs,
)
