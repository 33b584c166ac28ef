"""Freezing, with control groups and without: what moves on has no more time than others."""

import asyncio
from dataclasses import dataclass

import pytest

from posttrain.core.containment import Bound
from posttrain.core.task import Environment
from posttrain.sandbox import bubblewrap
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes
from posttrain.sandbox.holder import Lease


@pytest.fixture(params=["with groups", "without"])
def source(request, machine, monkeypatch):
    """A source of sandboxes, in either case."""
    spawn = bubblewrap.spawn
    if request.param == "without":
        monkeypatch.setattr(
            bubblewrap,
            "spawn",
            lambda _, *line, **how: spawn("tests.sandbox.groupless", *line, **how),
        )
    made = BubblewrapSandboxes()
    limits = asyncio.run(made.capabilities()).limits
    assert limits is (Bound.PROCESS if request.param == "without" else machine.capabilities.limits)
    yield made
    asyncio.run(made.close())


COUNT = """
import ctypes, os, sys, threading
def state():
    with open("/proc/self/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
def count(name):
    number = 0
    while sys.argv[1] == "first ends" and state() != "Z":
        pass
    while True:
        number += 1
        with open(name + ".new", "w") as file:
            file.write(str(number))
        os.rename(name + ".new", name)
for name in sys.argv[2:]:
    threading.Thread(target=count, args=(name,), daemon=True).start()
if sys.argv[1] == "first ends":
    ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
count("main")
"""


@pytest.mark.parametrize("first", ["first stays", "first ends"])
def test_every_thread_stands_still_and_goes_on(source, first):
    """A process whose first thread has ended was taken for dead, and its others ran on."""

    async def main():
        async with source.lease(Environment()) as sandbox:

            async def counts():
                return [await sandbox.read(name, max_bytes=99) for name in ("a", "b")]

            argv = ("python3", "-S", "-c", COUNT, first, "a", "b")
            running = asyncio.ensure_future(sandbox.exec(argv, timeout_s=20))
            while None in await counts():
                await asyncio.sleep(0)
            await sandbox.freeze()
            before = await counts()
            for _ in range(200):
                assert await counts() == before
            await sandbox.thaw()
            while await counts() == before:
                await asyncio.sleep(0)
            await sandbox.kill()
            await running

    asyncio.run(main())


@dataclass
class Run:
    """Of a command; only whether its time stands still."""

    frozen: bool = False

    def freeze(self):
        self.frozen = True


@dataclass
class Live:
    """Namespaces whose processes can be stopped, or cannot."""

    stands_still: bool

    async def stop(self):
        return self.stands_still


@pytest.mark.parametrize("stands_still", [True, False])
def test_time_stands_still_only_where_all_do(stands_still):
    """Whoever outran the signals had all the time in the world."""
    run = Run()
    lease = Lease(name="s", disk=None, group=None, live=Live(stands_still), runs={1: run})
    asyncio.run(lease.freeze())
    assert run.frozen is stands_still
