"""From one sandbox to another."""

import asyncio
import contextlib
import glob
import os
import resource
import signal
import socket

from posttrain.core.task import Environment
from tests.sandbox.attacks.attack import Family, Held
from tests.sandbox.attacks.probe import crowd, disperse, forked

FAMILY = Family("neighbours")


def test_held_inside_and_open_outside(attack, trial):
    trial(attack)


def put(given):
    for folder in ("/tmp", "/dev/shm"):
        with open(f"{folder}/{given['mark']}", "w"):
            pass


def get(given):
    found = 0
    for folder in ("/tmp", "/dev/shm"):
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/{given['mark']}")
            found += 1
    if not found:
        raise Held("none")


@FAMILY.attack("read a neighbour's files", held_by="a disk and a mount namespace for each")
async def read_neighbour(place):
    await place.run(put, mark=place.marker)
    other = await place.neighbour()
    await other.run(get, mark=place.marker)


def stay(given):
    with open("up", "w"):
        pass
    signal.alarm(20)
    signal.pause()


def find_and_signal(given):
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        pid = int(path.split("/")[2])
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if pid != os.getpid() and given["mark"].encode() in file.read():
                os.kill(pid, signal.SIGKILL)
                return
    raise Held("not among the processes")


@FAMILY.attack("end a neighbour's processes", held_by="a process namespace for each")
async def end_neighbour(place):
    async with running(place, stay):
        other = await place.neighbour()
        await other.run(find_and_signal, mark=place.marker)


@contextlib.asynccontextmanager
async def running(place, function, **given):
    """While a program runs that has said that it is up."""
    task = asyncio.ensure_future(place.run(function, may_die=True, **given))
    try:
        while True:
            with contextlib.suppress(FileNotFoundError):
                if await place.read("up") is not None:
                    break
            assert not task.done(), task
            await asyncio.sleep(0)
        yield
    finally:
        await place.end()
        with contextlib.suppress(Held):
            await task


def listen(given):
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0" + given["mark"])
        abstract.listen()
        with open("port", "w") as file:
            file.write(str(tcp.getsockname()[1]))
        os.rename("port", "up")
        signal.alarm(20)
        signal.pause()


def connect(given):
    if given["port"]:
        socket.create_connection(("127.0.0.1", given["port"]), timeout=2).close()
    else:
        with socket.socket(socket.AF_UNIX) as out:
            out.connect("\0" + given["mark"])


@FAMILY.attack(
    "connect to a neighbour's server on loopback", held_by="a network namespace for each"
)
async def connect_to_neighbour(place):
    async with running(place, listen, mark=place.marker):
        port = int(await place.read("up"))
        other = await place.neighbour()
        await other.run(connect, port=port, mark=place.marker)


@FAMILY.attack("connect to a neighbour's abstract socket", held_by="a network namespace for each")
async def connect_to_its_abstract(place):
    async with running(place, listen, mark=place.marker):
        other = await place.neighbour()
        await other.run(connect, port=0, mark=place.marker)


def change_shared(given):
    with open("base", "r+") as file:
        file.write("changed")


@FAMILY.attack(
    "change, from one fork, what the others and their parent see",
    held_by="each fork writes to a layer of its own over layers that never change",
    control="forks that share files by hard links",
    environment=Environment(files={"base": "as it was"}),
)
async def change_siblings(place):
    fork = await place.fork()
    await fork.run(change_shared)
    if await place.read("base") == b"as it was":
        raise Held("as it was")


@FAMILY.attack(
    "change the set-up that the next attempt begins with",
    held_by="a set-up is sealed, and each attempt writes to a layer of its own",
    control="a folder that is used again",
    environment=Environment(setup=("printf 'as it was' > base",)),
)
async def change_set_up(place):
    await place.run(change_shared)
    following = await place.successor()
    if await following.read("base") == b"as it was":
        raise Held("as it was")


def fill_processes(given):
    made = crowd(80)
    with open("up", "w"):
        pass
    signal.alarm(20)
    signal.pause()
    disperse(made)


def start_some(given):
    made = crowd(5)
    disperse(made)
    if len(made) == 5:
        raise Held("the neighbour starts its own")


def share_a_limit(given):
    """Two processes of one user under a limit of three."""
    ready, told = os.pipe()
    begin, go = os.pipe()

    def first():
        os.setresuid(61_001, 61_001, 61_001)
        resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))
        made = crowd(9)
        os.write(told, b"x")
        os.read(begin, 1)
        disperse(made)

    def second():
        os.setresuid(61_001, 61_001, 61_001)
        resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))
        made = crowd(1)
        disperse(made)
        if made:
            raise Held("it starts its own")

    pid = os.fork()
    if pid == 0:
        first()
        os._exit(0)
    os.read(ready, 1)
    try:
        forked(second)
    finally:
        os.write(go, b"x")
        os.waitpid(pid, 0)


@FAMILY.attack(
    "start so many processes that a neighbour, who is the same user, can start none",
    held_by="a user namespace and a control group count them for each sandbox",
    control="two processes of one user under one limit",
    outside=share_a_limit,
    root=True,
)
async def crowd_out(place):
    async with running(place, fill_processes):
        other = await place.neighbour()
        await other.run(start_some)
