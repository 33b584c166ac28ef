"""Getting out of the namespaces, and the calls that would help to."""

import contextlib
import ctypes
import errno
import glob
import mmap
import os
import socket

from tests.sandbox.attacks.attack import Family
from tests.sandbox.attacks.probe import (
    LIBC,
    X86,
    Held,
    call,
    checked,
    first,
    forked,
    opened,
    variants,
)

FAMILY = Family("escape")
CALLS, NO_POWER = "seccomp: the call is refused", "no capabilities, and no way to new ones"


def test_held_inside_and_open_outside(attack, trial):
    trial(attack)


@FAMILY.attack(
    "make a user namespace, for the capabilities in it",
    held_by="seccomp, and the last user namespace allows none below it",
    optional="a kernel that lets ordinary users make them",
)
def make_user_namespace(given):
    forked(lambda: checked(LIBC.unshare(0x10000000)))


@FAMILY.attack(
    "ask for namespaces by clone3, whose flags no filter sees",
    held_by="seccomp: no such call",
    optional="clone3",
)
def hide_flags(given):
    call(435, 435, 0, 0)


@FAMILY.attack(
    "call the kernel by the table of another architecture, which a filter of numbers misreads",
    held_by="seccomp: a foreign calling convention ends the process",
    optional="x86-64 with the calls of 32 bit",
)
def call_by_another_table(given):
    if not X86:
        raise Held("another machine")

    def act():
        area = mmap.mmap(-1, 4096, prot=7)
        area.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # getpid of 32 bit
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        if ctypes.CFUNCTYPE(ctypes.c_int)(address)() != os.getpid():
            raise Held("no answer")

    forked(act)


@FAMILY.attack("enter another namespace (setns)", held_by=CALLS)
def enter_namespace(given):
    call(308, 268, -1, 0)


@FAMILY.attack(
    "mount something (mount, fsopen, open_tree)",
    held_by="seccomp, and " + NO_POWER,
    root=True,
)
def mount_something(given):
    def mount():
        LIBC.mount(b"none", b"/nonexistent", b"tmpfs", 0, None)
        if ctypes.get_errno() != errno.ENOENT:
            raise Held(os.strerror(ctypes.get_errno()))

    variants(mount, lambda: call(430, 430, 0, -1), lambda: call(428, 428, -1, 0, -1))


@FAMILY.attack("change the root folder, to climb out of it", held_by=NO_POWER, root=True)
def change_root(given):
    forked(lambda: os.chroot("/"))


@FAMILY.attack("trace a process", held_by=CALLS)
def trace_process(given):
    call(101, 117, 16, 0x3FFFFFFF, 0, 0)


@FAMILY.attack("read another process's memory by its number", held_by=CALLS)
def read_memory(given):
    variants(
        lambda: call(310, 270, 0x3FFFFFFF, 0, 0, 0, 0, 0),
        lambda: call(311, 271, 0x3FFFFFFF, 0, 0, 0, 0, 0),
    )


@FAMILY.attack("take another process's descriptor (pidfd_getfd)", held_by=CALLS)
def take_descriptor(given):
    call(438, 438, -1, 0, 0)


@FAMILY.attack(
    "open a file of the host by its handle, past every mount",
    held_by="seccomp, and " + NO_POWER,
    root=True,
)
def open_by_handle(given):
    call(304, 265, -1, 0, 0)


@FAMILY.attack(
    "submit calls by a ring, where no filter sees them (io_uring)",
    held_by=CALLS,
    optional="io_uring",
)
def use_ring(given):
    call(425, 425, 0, 0)


@FAMILY.attack("load a program into the kernel (bpf)", held_by=CALLS, root=True, optional="bpf")
def load_program(given):
    call(321, 280, -1, 0, 0)


@FAMILY.attack(
    "stop the kernel within its own copying (userfaultfd)",
    held_by=CALLS,
    root=True,
    optional="userfaultfd",
)
def stop_kernel(given):
    call(323, 282, -1)


@FAMILY.attack("measure the kernel (perf_event_open)", held_by=CALLS, root=True, optional="perf")
def measure_kernel(given):
    call(298, 241, 0, 0, -1, -1, 0)


@FAMILY.attack("keep something in a keyring, which namespaces do not part", held_by=CALLS)
def use_keyring(given):
    variants(
        lambda: call(248, 217, 0, 0, 0, 0, 0),
        lambda: call(249, 218, 0, 0, 0, 0),
        lambda: call(250, 219, -1, 0, 0),
    )


@FAMILY.attack(
    "load a module, or another kernel",
    held_by="seccomp, and " + NO_POWER,
    root=True,
    optional="a kernel that still loads either",
)
def load_module(given):
    variants(
        lambda: call(175, 105, 0, 0, 0),
        lambda: call(246, 104, 0, 0, 0, 0xDEAD),
    )


@FAMILY.attack(
    "make sockets of a rare kind, whose code is loaded for it (vsock reaches the hypervisor)",
    held_by="seccomp: only Unix, internet and netlink sockets",
    optional="a kernel with one of them",
)
def make_rare_socket(given):
    variants(
        lambda: socket.socket(40, socket.SOCK_STREAM).close(),
        lambda: socket.socket(38, socket.SOCK_SEQPACKET).close(),
    )


@FAMILY.attack(
    "make a pair of such sockets, by another call",
    held_by="seccomp: only Unix, internet and netlink sockets",
    optional="a kernel with vsock or netlink pairs",
)
def make_rare_pair(given):
    pair = (ctypes.c_int * 2)()
    for family in (40, 38, 30):
        LIBC.socketpair(family, 1, 0, pair)
        if ctypes.get_errno() == errno.EOPNOTSUPP:  # One was made, though no pair.
            return
    raise Held(os.strerror(ctypes.get_errno()))


@FAMILY.attack("type into the terminal of whoever looks on (TIOCSTI)", held_by=CALLS)
def type_into_terminal(given):
    call(16, 29, -1, 0x5412, 0)


@FAMILY.attack("make a device", held_by=NO_POWER, root=True)
def make_device(given):
    os.mknod("device", 0o20600, os.makedev(1, 3))
    os.unlink("device")


@FAMILY.attack(
    "open a device of the host: a disk, the virtual machine's, loops, fuse, tun",
    held_by="a /dev of its own with seven harmless devices",
    root=True,
    optional="a machine with such devices",
)
def open_device(given):
    with open("/proc/partitions") as file:
        names = [line.split()[3] for line in file if line[:1] == " "]
    for name in [*names, "kvm", "loop-control", "fuse", "net/tun"]:
        with contextlib.suppress(OSError):
            opened(f"/dev/{name}", os.O_RDONLY)
            return
    raise Held("none can be opened")


@FAMILY.attack(
    "write over the running program that started this one",
    held_by="process namespace: the one who starts commands has no number inside",
    root=True,
)
def overwrite_starter(given):
    try:
        opened(f"/proc/{os.getppid()}/exe", os.O_WRONLY)
    except OSError as error:
        if error.errno != errno.ETXTBSY:
            raise


@FAMILY.attack(
    "go through the first process, by its root folder and descriptors",
    held_by="an empty folder covers /proc/1",
    control="the one who started it, since the host's first may be out of reach",
)
def pass_first_process(given):
    other = first(given)
    variants(lambda: os.readlink(f"/proc/{other}/root"), lambda: os.listdir(f"/proc/{other}/fd"))


@FAMILY.attack(
    "change kernel settings: what is run at a crash, the memory's caches, system requests",
    held_by="the host user is not root",
    root=True,
)
def change_settings(given):
    def write_same():
        with open("/proc/sys/kernel/core_pattern") as file:
            text = file.read()
        with open("/proc/sys/kernel/core_pattern", "w") as file:
            file.write(text)

    variants(
        write_same,
        lambda: opened("/proc/sys/vm/drop_caches", os.O_WRONLY),
        lambda: opened("/proc/sysrq-trigger", os.O_WRONLY),
    )


@FAMILY.attack(
    "move to another control group, or let its end run a program",
    held_by="no control group is mounted inside",
    root=True,
    optional="control groups",
)
def leave_control_group(given):
    files = glob.glob("/sys/fs/cgroup/cgroup.procs") + glob.glob("/sys/fs/cgroup/*/cgroup.procs")
    if not files:
        raise Held("none in sight")
    variants(*(lambda file=file: opened(file, os.O_WRONLY) for file in files))
