import asyncio
import contextlib
import os
import re
import select
import uuid
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest

from posttrain.core.containment import Sandbox
from posttrain.core.errors import IsolationError
from posttrain.core.task import Environment
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.cgroups import cgroup_places


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
    """Processes started by this one, whose threads come and go meanwhile."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


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


BY_OTHERS = re.compile("^/run/|^/media/|^/mnt/|/overlay|/containers/|/volumes/|/netns/")
"""Where a host's other programs mount things at any time, container engines above all."""


def host_mounts() -> list[str]:
    """What is mounted where, as the kernel tells it (proc(5)), but for what others come and go."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if not BY_OTHERS.search(line.split()[4])]


def groups_of(makers: Iterable[int]) -> set[str]:
    """Control groups that holders made whose keepers are among these processes."""
    places = cgroup_places(
        Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
    )
    names = [f"posttrain-{maker}" for maker in makers]
    folders = (folder for place in places for folder in place.folders)
    return {path for folder in folders for n in names if os.path.isdir(path := f"{folder}/{n}")}
