"""Changing the host, or what a task wants unchanged."""

import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import struct
from pathlib import Path

from posttrain.core.task import Environment
from tests.sandbox.attacks.attack import Family, Held
from tests.sandbox.attacks.probe import LIBC, checked, variants

FAMILY = Family("writing")
NO_POWER = "no capabilities, and no way to new ones"


def test_held_inside_and_open_outside(attack, trial):
    trial(attack)


@FAMILY.attack(
    "write into the system's folders: /, /usr, /etc, /dev",
    held_by="all but the sandbox's disk is mounted read-only",
    root=True,
)
def write_into_system(given):
    def make(folder):
        path = f"{folder}/{given['word']}"
        with open(path, "x"):
            os.unlink(path)

    def ask(folder):
        if not os.access(folder, os.W_OK):
            raise Held(f"{folder} cannot be written")

    variants(
        lambda: make("/"),
        lambda: make("/dev"),
        lambda: ask("/usr"),
        lambda: ask("/etc"),
    )


def leave_temporary(given):
    for folder in ("/tmp", "/dev/shm"):
        with open(f"{folder}/{given['marker']}", "w") as file:
            file.write(given["marker"])


@FAMILY.attack(
    "leave files in the host's temporary folders",
    held_by="/tmp and /dev/shm lie on the sandbox's own disk",
)
async def leave_on_host(place):
    paths = [Path(folder, place.marker) for folder in ("/tmp", "/dev/shm")]
    for path in paths:
        place.stack.callback(path.unlink, missing_ok=True)
    await place.run(leave_temporary)
    if not any(path.exists() for path in paths):
        raise Held("the host has none")


@FAMILY.attack("rename the host", held_by="a host name of its own, and " + NO_POWER, root=True)
def rename_host(given):
    name = socket.gethostname().encode()
    checked(LIBC.sethostname(name, len(name)))


@FAMILY.attack("move the host's clock", held_by=NO_POWER, root=True)
def move_clock(given):
    settings = ctypes.create_string_buffer(256)
    checked(LIBC.adjtimex(settings))
    struct.pack_into("i", settings, 0, 2)  # The frequency that was just read.
    checked(LIBC.adjtimex(settings))


@FAMILY.attack("change a network interface", held_by=NO_POWER, root=True)
def change_interface(given):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        request = struct.pack("16sH14x", b"lo", 0)
        fcntl.ioctl(line, 0x8914, fcntl.ioctl(line, 0x8913, request))


@FAMILY.attack(
    "signal a process of the host, or change its limits or priority",
    held_by="process namespace: the host's processes have no numbers inside",
)
def act_on_process(given):
    pid = given["pid"]
    variants(
        lambda: os.kill(pid, 0),
        lambda: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid)),
        lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE),
    )


def replace_it(given):
    with contextlib.suppress(OSError):
        os.rename("d", "moved")
        os.makedirs("d/e")
    with contextlib.suppress(OSError):
        os.unlink("d/e/kept")
    with contextlib.suppress(OSError), open("d/e/kept", "w") as file:
        file.write("changed")


@FAMILY.attack(
    "change what a task keeps read-only, by putting another folder in its place",
    held_by="it is mounted read-only, and the folders on the way cannot be moved",
    environment=Environment(files={"d/e/kept": "kept", "d/free": ""}, read_only=("d/e/kept",)),
)
async def replace_kept(place):
    await place.run(replace_it)
    left = await place.seal()
    if await left.read("d/e/kept") != b"changed":
        raise Held("as it was")
