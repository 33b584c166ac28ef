"""The few kernel calls that Python 3.11 has no function for, through the C library.

The one thing that must stay true: a call that fails raises `OSError` with its number.
"""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOSYMFOLLOW, MS_BIND, MS_REC, MS_PRIVATE = 256, 4096, 16384, 1 << 18
_OPEN_TREE, _MOVE_MOUNT = 428, 429
"""Call numbers, the same on every architecture (Linux `unistd.h`, calls from 424 on)."""
_MNT_DETACH = 2
_OPEN_TREE_CLONE, _FROM_DESCRIPTOR, _HERE = 1, 4, -100
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_KEEPCAPS = 1, 4, 8
_SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = 36, 38


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave namespaces for new ones (see the manual page of the same name, section 2)."""
    _checked(_LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount, or change a mount (manual page of the same name, section 2)."""
    arguments = (source.encode(), target.encode(), kind.encode())
    result = _LIBC.mount(*arguments, ctypes.c_ulong(flags), options.encode())
    _checked(result, f"mount {target}")


def unmount(path: str) -> None:
    """Take a mount away; it goes once nobody uses it: umount2(2) with MNT_DETACH."""
    _checked(_LIBC.umount2(path.encode(), _MNT_DETACH), f"umount {path}")


def enter_mounts(namespace: int) -> None:
    """Go to a mount namespace given by descriptor: setns(2); for single-threaded processes."""
    _checked(_LIBC.setns(namespace, CLONE_NEWNS), "setns")


def clone_mount(path: str) -> int:
    """A detached bind mount of a folder, by descriptor: open_tree(2). It can be attached in
    another mount namespace, which a plain bind mount cannot.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    descriptor = int(_LIBC.syscall(_OPEN_TREE, _HERE, path.encode(), ctypes.c_ulong(flags)))
    _checked(min(descriptor, 0), f"open_tree {path}")
    return descriptor


def attach_mount(descriptor: int, path: str) -> None:
    """Attach a detached mount: move_mount(2)."""
    flags = ctypes.c_ulong(_FROM_DESCRIPTOR)
    result = _LIBC.syscall(_MOVE_MOUNT, descriptor, b"", _HERE, path.encode(), flags)
    _checked(result, f"move_mount {path}")


def _prctl(option: int, value: int) -> None:
    _checked(_LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def signal_on_parent_death(number: int) -> None:
    """A signal for this process once the thread that started it ends. Forgotten when the process
    changes its user (prctl(2)), so call it afterwards.
    """
    _prctl(_SET_PDEATHSIG, number)


def own_proc_entries() -> None:
    """Own `/proc/self` again after a change of user."""
    _prctl(_SET_DUMPABLE, 1)


def adopt_orphans() -> None:
    """Orphans below this process become its children."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
    """No program started from here on gains privileges."""
    _prctl(_SET_NO_NEW_PRIVS, 1)


# --- entering a sandbox -----------------------------------------------------------------------

CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWNET = 1 << 25, 1 << 26, 1 << 27, 1 << 30
ALL_NAMESPACES = (
    CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    | CLONE_NEWCGROUP
)  # fmt: skip
_CAPABILITY_VERSION_3 = 0x20080522
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_FILTER_STEP_BYTES = 8


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def enter_namespaces_of(process: int, kinds: int = ALL_NAMESPACES) -> None:
    """Go to namespaces of a process given by pidfd: setns(2). The process namespace is that of
    children from now on; the user namespace brings all capabilities within it.
    """
    _checked(_LIBC.setns(process, kinds), "setns")


def drop_capabilities(*, but: int = 0) -> None:
    """Give up every capability but those of a mask for good: capset(2)."""
    header, kept = _CapabilityHeader(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)(but, but)
    _checked(_LIBC.capset(ctypes.byref(header), kept), "capset")


CAP_DAC_OVERRIDE = 1 << 1
"""Permissions of files do not hold."""


def become(uid: int, *, keep: int) -> None:
    """Become a user for good, with the capabilities of a mask and no others."""
    _prctl(_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    drop_capabilities(but=keep)


def hide_memory() -> None:
    """Keep this process and its forks, until they start a program, from being looked into by
    others of their user. A change of user undoes it.
    """
    _prctl(_SET_DUMPABLE, 0)


def forget_arguments() -> None:
    """Blank this process's command line, which everybody who sees the process may read, and that
    of its forks: `arg_start` and `arg_end` of proc(5).
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)


def filter_calls(program: bytes) -> None:
    """Install a filter of system calls (`seccomp.program`) for good."""
    steps = _Filter(len(program) // _FILTER_STEP_BYTES, program)
    result = _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(steps), 0, 0)
    _checked(result, "prctl seccomp")
