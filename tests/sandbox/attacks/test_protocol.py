"""Against those who start the commands: the usher, the first process, the holder.

Most of them want a failure of the machine on record, so that a hopeless attempt has no reward
instead of a bad one: a command must end in a result, whatever was done before and meanwhile.
"""

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import socket
import threading
import time

import pytest

from posttrain.core.containment import Cause
from posttrain.core.errors import SandboxError
from posttrain.core.task import Environment
from tests.sandbox.attacks.attack import Family, Held
from tests.sandbox.attacks.places import changes
from tests.sandbox.attacks.probe import (
    LIBC,
    X86,
    checked,
    crowd,
    detach,
    disperse,
    forked,
    only_inside,
    outrun,
    state_of,
)

FAMILY = Family("protocol")
OWN_DOING = "it is the command's own result"
KILL_STARTER = "primitive: one process may end the one that started it"


def test_held_inside_and_open_outside(attack, trial):
    trial(attack)


async def works(place, times=3):
    """Commands end in results; `Held` where they do, else an error of the sandbox."""
    try:
        async with asyncio.timeout(15):
            for _ in range(times):
                await place.works()
    except (SandboxError, TimeoutError):
        return
    raise Held("commands end in results")


# --- looking at what enters ---------------------------------------------------------------------


def watch(given):
    """What there is to see of processes that begin meanwhile."""
    arguments, looked_into, until = set(), [], time.monotonic() + 0.5
    while time.monotonic() < until:
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if not name.isdigit() or int(name) == os.getpid():
                    continue
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    arguments.add(file.read().strip(b"\0").decode())
                if os.readlink(f"/proc/{name}/exe") not in given["programs"]:
                    looked_into.append(name)
    return {"arguments": sorted(arguments), "looked_into": looked_into}


async def watched(place):
    """What was seen, some command at least, which takes more than one look on a busy machine."""
    while True:
        task = asyncio.ensure_future(place.run(watch, programs=["/usr/bin/true"]))
        while not task.done():
            await place.sandbox.exec(("/usr/bin/true",))
        seen = await task
        if any("true" in line for line in seen["arguments"]):
            return seen


def look_at_child(given):
    """A child shows the arguments and the program of the one that forked it."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        signal.pause()
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            if given["marker"] not in file.read():
                raise Held("no arguments")
        os.readlink(f"/proc/{pid}/exe")
    finally:
        disperse([pid])


@FAMILY.attack(
    "read the holder's command line of a process that is about to become a command",
    held_by="the usher blanks its own",
    control="primitive: a child shows the arguments of the one that forked it",
    outside=look_at_child,
)
async def read_arguments(place):
    seen = (await watched(place))["arguments"]
    if not any("/" in line.replace("/usr/bin/true", "") for line in seen):
        raise Held(str(seen))


@FAMILY.attack(
    "look into memory and descriptors of a process that is about to become a command",
    held_by="it cannot be looked into before it has started its program",
    control="primitive: a child can be looked into",
    outside=look_at_child,
)
async def look_into_entering(place):
    seen = await watched(place)
    if not seen["looked_into"]:
        raise Held("nothing but programs")


# --- disturbing what enters ---------------------------------------------------------------------


def hunt(given):
    """Act on every process that begins."""
    only_inside()
    until = time.monotonic() + 0.5
    known = set(os.listdir("/proc"))
    with open("up", "w"):
        pass
    while time.monotonic() < until:
        for name in set(os.listdir("/proc")) - known:
            with contextlib.suppress(OSError, ValueError):
                if given["how"] == "kill":
                    os.kill(int(name), signal.SIGKILL)
                for limit in given["limits"]:
                    resource.prlimit(int(name), limit, (0, 0))


def end_starter(given):
    """A child ends the one that forked it."""
    pid = os.fork()
    if pid == 0:
        starter = os.getpid()
        if os.fork() == 0:
            os.kill(starter, signal.SIGKILL)
            os._exit(0)
        signal.alarm(20)
        signal.pause()
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != -signal.SIGKILL:
        raise Held("it lives")


async def through(place, task):
    """Commands while a hunter is about: `Held` where all end in results."""
    while await place.read("up") is None:
        await asyncio.sleep(0)
    try:
        while not task.done():
            result = await place.shell("true")
            assert result.cause in (Cause.EXITED, Cause.SIGNALLED), result
    except SandboxError:
        return
    await task
    raise Held("commands end in results")


@FAMILY.attack(
    "end every process that is about to become a command",
    held_by=OWN_DOING,
    control=KILL_STARTER,
    outside=end_starter,
)
async def end_entering(place):
    await through(place, asyncio.ensure_future(place.run(hunt, how="kill", limits=[])))


def limit_child(given):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        signal.pause()
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))
    finally:
        disperse([pid])


@FAMILY.attack(
    "take from every process that is about to become a command what it needs (prlimit)",
    held_by=OWN_DOING,
    control="primitive: one process may lower another's limits",
    outside=limit_child,
)
async def starve_entering(place):
    limits = [resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_STACK]
    await through(place, asyncio.ensure_future(place.run(hunt, how="limit", limits=limits)))


def end_first(given):
    """Everything that could end the first process."""
    only_inside()
    for number in range(1, 65):
        with contextlib.suppress(OSError):
            os.kill(1, number)
    for limit in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NOFILE):
        with contextlib.suppress(OSError):
            resource.prlimit(1, limit, (0, 0))
    with contextlib.suppress(OSError):
        os.kill(-1, signal.SIGKILL)
    os.kill(1, 0)


@FAMILY.attack(
    "end the first process, and the namespaces with it",
    held_by="the kernel keeps signals of its own namespace from it; it uses no time",
    control=KILL_STARTER,
    outside=end_starter,
)
async def end_namespaces(place):
    try:
        await place.run(end_first, may_die=True)
    except Held:
        return
    await works(place)


# --- failures of the machine, made --------------------------------------------------------------


def pass_child_on(given):
    """A child whose parent is the one that started this process, who does not know of it."""
    flags = 0x8000 | signal.SIGCHLD
    pid = checked(LIBC.syscall(56 if X86 else 220, flags, 0, 0, 0, 0))
    if pid == 0:
        os._exit(0)


def receive_child(given):
    begin, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        child = LIBC.syscall(56 if X86 else 220, 0x8000 | signal.SIGCHLD, 0, 0, 0, 0)
        if child == 0:
            os._exit(7)
        os.read(begin, 1)
        os._exit(0)
    ended, status = os.waitpid(-1, 0)
    os.write(go, b"x")
    if ended == pid or os.waitstatus_to_exitcode(status) != 7:
        raise Held("no child of another")
    os.waitpid(pid, 0)


@FAMILY.attack(
    "hand a dead child to the usher, who does not collect it, so that the namespaces never end",
    held_by="the usher is ended with the sandbox, and the kernel collects for the holder",
    control="primitive: a process gives its parent a child",
    outside=receive_child,
)
async def hand_child_over(place):
    await place.run(pass_child_on)
    try:
        async with asyncio.timeout(10):
            await place.end()
    except (SandboxError, TimeoutError):
        return
    raise Held("the end comes at once")


def send_in_flight(given):
    """Descriptors that are on their way for ever, in sockets that are on their way themselves."""
    file = os.open(given["path"], os.O_WRONLY | os.O_CREAT)
    one, two, three, four = *socket.socketpair(), *socket.socketpair()
    socket.send_fds(one, [b"x"], [file, two.fileno(), three.fileno()])
    socket.send_fds(two, [b"x"], [file, one.fileno(), four.fileno()])
    socket.send_fds(three, [b"x"], [file, four.fileno(), one.fileno()])
    socket.send_fds(four, [b"x"], [file, three.fileno(), two.fileno()])
    with open("up", "w"):
        pass
    signal.alarm(20)
    signal.pause()


def keep_busy(given):
    """A file system of this process's own is busy after the one who used it has ended."""

    def act():
        checked(LIBC.unshare(0x00020000))
        checked(LIBC.mount(b"none", b"/", None, ctypes.c_ulong(0x44000), None))
        os.mkdir("disk")
        checked(LIBC.mount(b"tmpfs", b"disk", b"tmpfs", ctypes.c_ulong(0), None))
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                file = os.open("disk/held", os.O_WRONLY | os.O_CREAT)
                one, two, three, four = *socket.socketpair(), *socket.socketpair()
                socket.send_fds(one, [b"x"], [file, two.fileno(), three.fileno()])
                socket.send_fds(two, [b"x"], [file, one.fileno(), four.fileno()])
                socket.send_fds(three, [b"x"], [file, four.fileno(), one.fileno()])
                socket.send_fds(four, [b"x"], [file, three.fileno(), two.fileno()])
                os._exit(0)
            os.waitpid(pid, 0)
            if LIBC.mount(b"", b"disk", b"", ctypes.c_ulong(1 | 32), None) == -1:
                return
            checked(LIBC.mount(b"", b"disk", b"", ctypes.c_ulong(32), None))
        raise Held("never busy")

    forked(act)


@FAMILY.attack(
    "keep the disk busy after the end, so that it cannot be sealed (descriptors in flight)",
    held_by="sealing makes its own mounts read-only, which nothing of the sandbox can keep busy",
    control="primitive: a file system is busy after its user's end",
    outside=keep_busy,
    root=True,
)
async def keep_disk_busy(place):
    task = asyncio.ensure_future(place.run(send_in_flight, path="held", may_die=True))
    while await place.read("up") is None:
        await asyncio.sleep(0)
    try:
        await place.seal()
    except SandboxError:
        return
    finally:
        with contextlib.suppress(Held):
            await task
    raise Held("sealed")


def shut_out(given):
    """A folder's owner who is shut out of it."""
    os.mkdir("shut", 0o700)
    os.chown("shut", 61_001, 61_001)
    folder = os.open("shut", os.O_RDONLY)

    def act():
        os.setresuid(61_001, 61_001, 61_001)
        os.fchdir(folder)
        os.fchmod(folder, 0)
        try:
            os.fchdir(folder)
        except PermissionError:
            return
        raise Held("not shut out")

    forked(act)


@FAMILY.attack(
    "shut the workspace and meet the time limit, so that nothing can be started in it again",
    held_by="it is opened before anything enters",
    control="primitive: a folder's owner is shut out of it",
    outside=shut_out,
    root=True,
)
async def shut_workspace(place):
    line = "chmod 000 /tmp /dev/shm /workspace; while :; do :; done"
    assert (await place.shell(line, timeout_s=0.3)).timed_out
    await works(place)


def hold_little(given):
    for _ in range(40):
        if os.fork() == 0:
            signal.alarm(20)
            held = bytearray(b"x") * (3 << 20)
            signal.pause()
            os._exit(held[0])
    signal.alarm(20)
    time.sleep(0.3)
    os.killpg(0, signal.SIGKILL)


def allocate(given):
    bytearray(b"x") * (120 << 20)


@FAMILY.attack(
    "use up the group's memory in processes so small that the usher is the one to go",
    held_by="its end is told as the command's, and another enters",
    control="primitive: that much memory can be had",
    outside=allocate,
    environment=Environment(memory_bytes=96 << 20),
    tree=True,
)
async def outlive_usher(place):
    with contextlib.suppress(Held):
        await place.run(hold_little, may_die=True)
    await works(place)


def fill_up(given):
    with open("big", "wb") as file:
        for _ in range(72):
            file.write(bytes(1 << 20))


@FAMILY.attack(
    "use up the group's memory with files, so that no command has room",
    held_by="an usher joins the group last; what comes of it is the command's own end",
    control="primitive: that much can be written",
    outside=fill_up,
    environment=Environment(memory_bytes=48 << 20, disk_bytes=96 << 20),
    tree=True,
)
async def leave_no_room(place):
    with contextlib.suppress(Held):
        await place.run(fill_up, may_die=True)
    await works(place, times=4)


def leave_processes(given):
    made = crowd(80)
    if len(made) == 80:
        disperse(made)


@FAMILY.attack(
    "leave so many processes that the next command cannot be started",
    held_by=OWN_DOING,
    control="primitive: that many can be started",
    outside=leave_processes,
)
async def leave_no_process(place):
    await place.run(leave_processes)
    result = await place.shell("true")
    assert result.exit_code in (0, 126, 2), result
    await works(place)


async def believe_words(place):
    """A harness that takes a failure of the machine from what was printed."""
    printed = await place.run(print_words)
    assert "bwrap:" in printed


def print_words(given):
    return "bwrap: Creating new namespace failed"


@FAMILY.attack(
    "print the words of a failure of the machine, and die as in one",
    held_by="what ended a command is told by the usher, never by its output",
    control="a harness that looks for such words",
    outside=believe_words,
)
async def print_failure(place):
    line = "echo 'bwrap: Creating new namespace failed' >&2; kill -9 1 -1; kill -9 $$"
    try:
        result = await place.shell(line)
    except SandboxError:
        return
    if "bwrap:" in result.stderr and result.exit_code != 137:
        return
    raise Held("told as it was")


# --- time ---------------------------------------------------------------------------------------


def stop_each(given):
    outrun(signal.SIGSTOP)


def leave_thread(given):
    """A process whose first thread has ended, so that it seems dead, while another runs."""

    def stay():
        def count():
            number = 0
            while state_of(os.getpid()) != "Z":
                pass
            while True:
                number += 1
                with open("new", "w") as file:
                    file.write(str(number))
                os.rename("new", "n")

        with open("pid", "w") as file:
            file.write(str(os.getpid()))
        threading.Thread(target=count, daemon=True).start()
        LIBC.syscall(60 if X86 else 93, 0)

    detach(stay, "n")


async def look_at_first_thread(place):
    """A harness that takes a process's state for that of all its threads."""
    await place.run(leave_thread)
    pid = int(await place.read("pid"))
    try:
        assert state_of(pid) == "Z"
        if not await changes(place, "n"):
            raise Held("it stands still")
    finally:
        os.kill(pid, signal.SIGKILL)


@FAMILY.attack(
    "go on while frozen in a thread, the first one of the process being dead",
    held_by="the control group is frozen, or all threads of a process are looked at",
    control="a harness that looks at the state of each process",
    outside=look_at_first_thread,
)
async def outlive_first_thread(place):
    await place.run(leave_thread)
    await place.sandbox.freeze()
    moved = await changes(place, "n")
    await place.sandbox.thaw()
    if not moved:
        raise Held("all stand still")


FLY = r"""
#include <fcntl.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
int main(void) {
  int log = open("n", O_WRONLY | O_CREAT, 0644);
  long n = 0;
  time_t end = time(0) + 5;
  char text[32];
  for (int i = 0; i < 5; i++) if (fork() == 0) n += i * 1000;
  while (time(0) < end) {
    if (++n % 20 == 0) pwrite(log, text, sprintf(text, "%ld\n", n), 0);
    if (fork() > 0) _exit(0);
  }
}
"""


@FAMILY.attack(
    "go on while frozen, when time limits stand still, by forking faster than one is stopped",
    held_by="the control group is frozen; without it what outruns the signals has its time go on",
    control="each process seen is stopped once",
    outside=stop_each,
    tree=True,
)
async def outrun_freezing(place):
    built = await place.build(FLY)
    if not built:
        pytest.skip("no compiler inside, and an interpreter is too slow to get away")
    for _ in range(3):
        await place.shell("rm -f n; ./attack & while [ ! -s n ]; do :; done")
        await place.sandbox.freeze()
        moved = await changes(place, "n")
        await place.sandbox.thaw()
        await place.end()
        if moved:
            return
    raise Held("all stand still")
