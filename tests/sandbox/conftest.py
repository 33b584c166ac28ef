import asyncio
import contextlib
import os
import select
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from posttrain.core.containment import Sandbox
from posttrain.core.errors import IsolationError
from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes


@pytest.fixture(scope="session")
def machine():
    """What this machine's sandboxes can do; tests that need one are skipped where the machine lets
    none be made, and fail where one breaks.
    """

    async def body():
        async with BubblewrapSandboxes() as source:
            return await source.abilities()

    try:
        return asyncio.run(body())
    except IsolationError as error:
        pytest.skip(f"no sandbox works here: {error}")


@pytest.fixture(scope="session")
def sandboxes(machine):
    """One source for all tests, used from one event loop after another."""
    source = BubblewrapSandboxes()
    yield source
    source.check()
    left, prepared = source.stats(), source.prepared
    asyncio.run(source.close())
    assert (left.open, left.sealed) == (0, prepared), left


@pytest.fixture
def inside(sandboxes):
    """Run a body with a sandbox of an environment."""

    def run(
        body: Callable[[Sandbox], Awaitable[object]], environment: Environment | None = None
    ) -> object:
        async def main() -> object:
            async with sandboxes.lease(environment or Environment()) as sandbox:
                return await body(sandbox)

        return asyncio.run(main())

    return run


@pytest.fixture
def marker():
    """A word by which a test finds its processes on the host."""
    return f"marker-{uuid.uuid4().hex}"


def processes_named(word: str) -> list[int]:
    """Host processes with the word in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                text = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if word.encode() in text:
                found.append(int(folder.name))
    return found


def children() -> set[int]:
    """Processes started by this one."""
    folder = Path("/proc/self/task")
    return {
        int(pid) for task in folder.iterdir() for pid in (task / "children").read_text().split()
    }


def tree_below(pid: int) -> list[int]:
    """A process's descendants; one that ends meanwhile has none."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for inner in (task / "children").read_text().split():
                found += [int(inner), *tree_below(int(inner))]
    return found


def all_end(pids: list[int], *, within_s: float) -> bool:
    """Whether the processes end in time, told by the kernel."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([descriptor], [], [], within_s)[0]:
                return False
        finally:
            os.close(descriptor)
    return True
