"""Staying after the end: of a command, of a sandbox, of an attempt."""

import contextlib
import os
import signal

from tests.sandbox.attacks.attack import Family, Held
from tests.sandbox.attacks.places import changes
from tests.sandbox.attacks.probe import LIBC, checked, detach, outrun

FAMILY = Family("persistence")
WITH_FIRST = "process namespace: with its first process the kernel ends all, at once"


def test_held_inside_and_open_outside(attack, trial):
    trial(attack)


async def ended(place):
    """End the place; held if nothing of it is alive."""
    await place.end()
    if not place.left():
        raise Held("nothing is left")


def become_daemon(given):
    def stay():
        signal.pthread_sigmask(signal.SIG_BLOCK, set(range(1, 65)) - {signal.SIGALRM})
        with open("up", "w"):
            pass
        signal.pause()

    detach(stay, "up")


@FAMILY.attack(
    "leave a process in a session of its own that ignores every signal it can",
    held_by=WITH_FIRST,
    control="a signal to the process group, as for most harnesses",
)
async def leave_daemon(place):
    await place.run(become_daemon)
    await ended(place)


def stop_oneself(given):
    def stay():
        with open("up", "w"):
            pass
        os.kill(os.getpid(), signal.SIGSTOP)

    detach(stay, "up")


@FAMILY.attack(
    "stop oneself, so that a polite signal waits",
    held_by=WITH_FIRST,
    control="a signal to the process group, as for most harnesses",
)
async def stay_stopped(place):
    await place.run(stop_oneself)
    await ended(place)


def kill_each(given):
    outrun(signal.SIGKILL)


def fly(given):
    def comet():
        signal.alarm(5)
        for number in range(8_000):
            if number == 20:
                with open("up", "w"):
                    pass
            if os.fork():
                os._exit(0)
            signal.alarm(5)

    def swarm():
        for _ in range(7):
            if os.fork() == 0:
                break
        comet()

    detach(swarm, "up")


@FAMILY.attack(
    "go on in a new process all the time, so that any number is old",
    held_by=WITH_FIRST,
    control="each number seen is killed once",
    outside=kill_each,
)
async def outrun_the_end(place):
    await place.run(fly)
    await ended(place)


def write_on(given):
    def write():
        number = 0
        while True:
            number += 1
            with open("log.new", "w") as file:
                file.write(str(number))
            os.rename("log.new", "log")

    detach(write, "log")


@FAMILY.attack(
    "write on while what was left is read",
    held_by="sealing ends all processes before anything is read, and is read-only",
    control="a folder that is read while something runs",
)
async def write_while_read(place):
    await place.run(write_on)
    left = await place.seal()
    if not await changes(left, "log"):
        raise Held("it stays as it is")


def leave_files(given):
    for folder in ("/tmp", "/dev/shm"):
        with open(f"{folder}/{given['mark']}", "w"):
            pass


def find_files(given):
    found = 0
    for folder in ("/tmp", "/dev/shm"):
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/{given['mark']}")
            found += 1
    if not found:
        raise Held("none")


@FAMILY.attack(
    "leave files for the next attempt in temporary folders",
    held_by="the disk goes with its sandbox",
)
async def leave_for_next(place):
    await place.run(leave_files, mark=place.marker)
    following = await place.successor()
    await following.run(find_files, mark=place.marker)


def leave_segment(given):
    checked(LIBC.shmget(given["key"], 4096, 0o600 | 0o1000))


def find_segment(given):
    checked(LIBC.shmctl(checked(LIBC.shmget(given["key"], 0, 0)), 0, None))


@FAMILY.attack(
    "leave a memory segment for the next attempt",
    held_by="a namespace of its own for System V memory, which ends with it",
)
async def leave_segment_for_next(place):
    key = int(place.marker[-7:], 16)
    place.stack.callback(lambda: LIBC.shmctl(LIBC.shmget(key, 0, 0), 0, None))
    await place.run(leave_segment, key=key)
    following = await place.successor()
    await following.run(find_segment, key=key)


def plant(given):
    with open(f"{os.environ['HOME'] if given['inside'] else '.'}/.bash_profile", "w") as file:
        file.write("echo > ran\n")


@FAMILY.attack(
    "plant start-up files that the checker's programs read",
    held_by="a checker has a home of its own; what was left lies beside it",
    control="a check in the folder of the attempt, as its home",
)
async def plant_in_home(place):
    inside = place.beside.startswith("/")
    await place.run(plant, inside=inside)
    checker = await place.checker()
    await checker.login()
    with contextlib.suppress(FileNotFoundError):
        if await checker.read("ran") is not None:
            return
    raise Held("none of it ran")
