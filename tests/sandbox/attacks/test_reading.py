"""Learning what is the host's, or what a task hides."""

import contextlib
import ctypes
import glob
import os
import socket

from posttrain.core.task import Environment
from tests.sandbox.attacks.attack import Family
from tests.sandbox.attacks.probe import LIBC, Held, call, checked, first, opened, variants

FAMILY = Family("reading")
CLEAN = "a root of its own: /usr, a small /etc, and the sandbox's disk"
NUMBERS = "process namespace: only the sandbox's processes are seen"


def test_held_inside_and_open_outside(attack, trial):
    trial(attack)


@FAMILY.attack("read the host's passwords", held_by="an /etc of its own", root=True)
def read_passwords(given):
    opened("/etc/shadow", os.O_RDONLY)


@FAMILY.attack("read other processes' environment", held_by=NUMBERS)
def read_environments(given):
    for path in glob.glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if path != f"/proc/{os.getpid()}/environ" and given["secret"].encode() in file.read():
                return
    raise Held("no process shows it")


@FAMILY.attack(
    "find secrets in the environment that was inherited",
    held_by="a fixed environment",
)
def inherit_environment(given):
    if given["secret"] not in os.environ.values():
        raise Held("not in it")


@FAMILY.attack(
    "find descriptors that were inherited",
    held_by="all but three are closed before the program starts",
)
def inherit_descriptors(given):
    if not {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, 3}:
        raise Held("only the standard ones")


@FAMILY.attack("list other processes and their command lines", held_by=NUMBERS)
def list_processes(given):
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        if path != f"/proc/{os.getpid()}/cmdline":
            with contextlib.suppress(OSError), open(path, "rb") as file:
                if given["word"].encode() in file.read():
                    return
    raise Held("not among the processes")


@FAMILY.attack(
    "look into the host's folders: home, project, interpreter, /run, /var",
    held_by=CLEAN,
)
def look_into_folders(given):
    variants(
        lambda: os.listdir(given["home"]),
        lambda: os.listdir(given["project"]),
        lambda: opened(given["python"], os.O_RDONLY),
        lambda: os.listdir("/run"),
        lambda: os.listdir("/var/log"),
    )


@FAMILY.attack(
    "read the host's temporary files, by links of /proc as well",
    held_by="/tmp and /dev/shm lie on the sandbox's own disk",
)
def read_temporary_files(given):
    climbs = ("", "/proc/self/root", "/proc/self/cwd" + "/.." * 40, f"/proc/{first(given)}/root")
    paths = [climb + given[name] for climb in climbs for name in ("file", "shared")]
    variants(*(lambda path=path: opened(path, os.O_RDONLY) for path in paths))


@FAMILY.attack(
    "read the kernel's memory",
    held_by="the host user is not root",
    root=True,
    optional="a kernel that shows it to root",
)
def read_kernel_memory(given):
    variants(
        lambda: opened("/proc/kcore", os.O_RDONLY),
        lambda: opened("/dev/mem", os.O_RDONLY),
    )


@FAMILY.attack(
    "read the kernel's log",
    held_by="seccomp: the call is refused, and there is no /dev/kmsg",
    root=True,
)
def read_kernel_log(given):
    variants(
        lambda: call(103, 116, 10, 0, 0),
        lambda: opened("/dev/kmsg", os.O_RDONLY),
    )


@FAMILY.attack("read the state of hardware and kernel in /sys", held_by="there is no /sys")
def read_hardware(given):
    os.listdir("/sys/kernel")


@FAMILY.attack(
    "see what the host has mounted where",
    held_by="mount namespace: the host's mounts are gone from it",
    optional="a host with mounts of its own",
)
def see_mounts(given):
    with open("/proc/self/mountinfo") as file:
        points = {line.split()[4] for line in file}
    if not points & set(given["mounts"]):
        raise Held("none of the host's")


@FAMILY.attack("learn the host's name", held_by="a host name of its own")
def learn_name(given):
    if socket.gethostname() != given["name"]:
        raise Held("another name")


@FAMILY.attack(
    "attach a memory segment of the host by its number",
    held_by="a namespace of its own for System V memory",
)
def attach_segment(given):
    checked(LIBC.shmctl(given["segment"], 2, ctypes.create_string_buffer(256)))


def move_it(given):
    with contextlib.suppress(OSError):
        os.rename("d", "moved")


def look_for_it(given):
    for path in glob.glob("**", recursive=True):
        if os.path.isfile(path):
            with open(path) as file:
                if "the key" in file.read():
                    return
    raise Held("found nowhere")


@FAMILY.attack(
    "read what a task hides, by moving the folder it is in and a snapshot",
    held_by="what is hidden is covered, and the folders on the way cannot be moved",
    environment=Environment(files={"d/e/key": "the key", "d/free": ""}, hidden=("d/e/key",)),
)
async def read_hidden(place):
    await place.run(move_it)
    await place.snapshot()
    await place.run(look_for_it)
