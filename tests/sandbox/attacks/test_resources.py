"""Using up what others need (BR-45)."""

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import socket

from posttrain.core.task import Environment
from tests.sandbox.attacks.attack import Family
from tests.sandbox.attacks.probe import LIBC, X86, Held, checked, crowd, disperse, forked

FAMILY = Family("resources")
GROUP = "the control group limits memory of the whole sandbox"
SMALL = Environment(memory_bytes=96 << 20, disk_bytes=4 << 20, max_processes=12)


def test_held_inside_and_open_outside(attack, trial):
    trial(attack)


@FAMILY.attack("start processes without end", held_by="a limit of processes", environment=SMALL)
def start_processes(given):
    made = crowd(40)
    disperse(made)
    if len(made) < 40:
        raise Held(f"{len(made)} were started")


@FAMILY.attack("allocate memory", held_by="a limit of addresses", environment=SMALL)
def allocate(given):
    try:
        bytearray(120 << 20)
    except MemoryError as error:
        raise Held("no memory") from error


def hold_in_children(given):
    made, lines = [], []
    for _ in range(4):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            ours.close()
            held = bytearray(b"x") * (30 << 20)
            theirs.send(held[:1])
            while theirs.recv(1):
                theirs.send(held[-1:])
            os._exit(0)
        theirs.close()
        made.append(pid)
        lines.append(ours)
        ours.recv(1)
    holding = 0
    for line in lines:  # Only now do all hold theirs, but for those that were ended meanwhile.
        with contextlib.suppress(OSError):
            line.send(b"?")
            holding += bool(line.recv(1))
    disperse(made)
    if holding < 4:
        raise Held(f"{holding} of 4 held theirs")


@FAMILY.attack(
    "allocate memory in many processes, each within its limit",
    held_by=GROUP,
    environment=SMALL,
    tree=True,
)
async def allocate_in_many(place):
    await place.run(hold_in_children, may_die=True)


def hold_files(given):
    for _ in range(60):
        os.write(os.memfd_create("held"), bytes(2 << 20))


@FAMILY.attack(
    "hold memory that no process has mapped (memfd)", held_by=GROUP, environment=SMALL, tree=True
)
async def hold_unmapped(place):
    await place.run(hold_files, may_die=True)


def hold_segments(given):
    LIBC.shmat.restype = ctypes.c_void_p
    made = []
    try:
        for _ in range(4):
            made.append(checked(LIBC.shmget(0, 30 << 20, 0o600)))
            address = LIBC.shmat(made[-1], None, 0)
            ctypes.memset(address, 1, 30 << 20)
            LIBC.shmdt(ctypes.c_void_p(address))
    finally:
        for segment in made:
            LIBC.shmctl(segment, 0, None)


@FAMILY.attack(
    "hold memory that outlives its process (System V segments)",
    held_by=GROUP,
    environment=SMALL,
    tree=True,
)
async def hold_in_segments(place):
    await place.run(hold_segments, may_die=True)


def queue_bytes(given):
    queued, kept = 0, []
    server = socket.create_server(("127.0.0.1", 0))
    while queued < 64 << 20:
        if len(kept) == 300:
            raise Held(f"{queued} bytes were taken")
        sender = socket.create_connection(server.getsockname())
        kept += [sender, server.accept()[0]]
        sender.setblocking(False)
        try:
            while True:
                queued += sender.send(bytes(1 << 16))
        except BlockingIOError:
            pass


@FAMILY.attack(
    "fill the buffers of sockets, which count apart",
    held_by="the control group counts buffers of internet sockets too",
    environment=Environment(memory_bytes=48 << 20),
    tree=True,
)
async def fill_buffers(place):
    """On v1 no more is taken; on v2 they are memory like any other: one dies or meets the limit."""
    await place.run(queue_bytes, may_die=True)


def fill_folders(given):
    most = 0
    for folder in given["folders"]:
        names = [f"{folder}/{given['marker']}{number}" for number in range(8)]
        try:
            for name in names:
                with open(name, "wb") as file:
                    file.write(bytes(1 << 20))
        except OSError as error:
            reason = str(error)
        most = max(most, sum(os.path.getsize(name) for name in names if os.path.exists(name)))
        for name in names:
            if os.path.exists(name):
                os.unlink(name)
    if most < 8 << 20:
        raise Held(f"{most} bytes at most, {reason}")


@FAMILY.attack(
    "fill every place that can be written: the workspace, /tmp, /dev/shm, /dev",
    held_by="they lie on one disk of a fixed size; /dev is read-only",
    environment=SMALL,
)
async def fill_disk(place):
    inside = place.beside.startswith("/")
    folders = [".", "/tmp", "/dev/shm", "/dev"] if inside else ["."]
    await place.run(fill_folders, folders=folders)


@FAMILY.attack(
    "reserve room for a file that is never written",
    held_by="reserved room counts on the disk as well",
    environment=SMALL,
)
def reserve_room(given):
    with open("reserved", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 3 << 20)
        with open("more", "wb") as more:
            os.posix_fallocate(more.fileno(), 0, 3 << 20)


@FAMILY.attack(
    "make files without end, each of them empty",
    held_by="a number of files for each disk",
    environment=SMALL,
)
def make_files(given):
    for number in range(1500):
        with open(f"f{number}", "w"):
            pass


@FAMILY.attack(
    "leave a file of a terabyte that takes no room, for whoever copies it",
    held_by="no file may be longer than the disk",
    environment=SMALL,
)
def make_long_file(given):
    with open("long", "wb") as file:
        os.ftruncate(file.fileno(), 1 << 40)


@FAMILY.attack("open files without end", held_by="a limit of descriptors")
def open_files(given):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for _ in range(1100):
        os.dup(1)


@FAMILY.attack("lock memory, so that none of it can be reclaimed", held_by="a limit of it",
               root=True)  # fmt: skip
def lock_memory(given):
    area = mmap.mmap(-1, 1 << 20)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    checked(LIBC.mlock(ctypes.c_void_p(start), ctypes.c_size_t(1 << 20)))


@FAMILY.attack(
    "keep messages in queues of the kernel",
    held_by="no room for messages, and a namespace of its own for them",
    optional="POSIX message queues",
)
def keep_messages(given):
    name = ("/" + given["marker"]).encode()
    checked(LIBC.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, None))
    checked(LIBC.mq_unlink(name))


@FAMILY.attack(
    "leave images of crashed processes",
    held_by="no process leaves one (where the host writes them itself)",
    optional="a host that writes them into the process's folder",
)
def leave_images(given):
    def crash():
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (1 << 30, 1 << 30))
        except ValueError as error:
            raise Held(str(error)) from error
        os.abort()

    try:
        forked(crash)
    except Held:
        if not [name for name in os.listdir() if name.startswith("core")]:
            raise


@FAMILY.attack(
    "take all watches that the kernel grants one user (inotify)",
    held_by="a number of them for each sandbox",
)
def take_watches(given):
    for _ in range(40):
        checked(LIBC.inotify_init1(0))


@FAMILY.attack(
    "take all signals that the kernel queues for one user",
    held_by="a number of them for each sandbox",
)
def take_signals(given):
    signal.pthread_sigmask(signal.SIG_BLOCK, {40})
    for number in range(2000):
        if LIBC.sigqueue(os.getpid(), 40, None) == -1:
            raise Held(f"{number} were queued")


@FAMILY.attack(
    "take all asynchronous requests that the kernel has for all users (io_setup)",
    held_by="seccomp: the call is refused",
    optional="a kernel with them",
)
def take_requests(given):
    checked(LIBC.syscall(206 if X86 else 0, 8, ctypes.byref(ctypes.c_ulong(0))))


@FAMILY.attack(
    "take all terminals that the kernel has",
    held_by="a number of them for each sandbox",
)
def take_terminals(given):
    for _ in range(100):
        os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
