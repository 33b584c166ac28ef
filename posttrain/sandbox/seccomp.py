"""A deny list of system calls: a classic BPF program for bubblewrap, a profile for containers.

Not an allow-list: ordinary programs must run. It takes away what widens the kernel's surface or
looks past the namespaces: io_uring, bpf, keys, userfaultfd, perf, kexec, modules, the mount
interface, tracing, new namespaces, the kernel log, asynchronous requests (of which all users
together have a fixed number), and socket families other than unix, internet and netlink (vsock
reaches the hypervisor from inside any network namespace). Layout of the program and of `struct
seccomp_data`: Linux `userspace-api/seccomp_filter.rst`. The one thing that must stay true: a call
under a foreign calling convention never passes.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24
"""Offsets of call number, architecture, and the low words of the first two arguments."""

NEW_NAMESPACES = 0x7E020000
"""CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}."""
SOCKET_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""
TERMINAL_INJECTION = (0x5412, 0x541C)
"""TIOCSTI, TIOCLINUX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Numbers of one architecture."""

    audit: int
    denied: Mapping[str, int]
    clone: int
    sockets: tuple[int, int]
    """`socket` and `socketpair`."""
    ioctl: int
    foreign_from: int | None = None
    """Call numbers from here on belong to another convention (x32)."""


_SAME_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443, "open_tree_attr": 467,
}  # fmt: skip
_CLONE3 = 435

MACHINES: Mapping[str, Machine] = {
    "x86_64": Machine(
        audit=0xC000003E,
        denied={
            "ptrace": 101, "syslog": 103, "pivot_root": 155, "acct": 163, "mount": 165,
            "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "init_module": 175,
            "delete_module": 176, "quotactl": 179, "lookup_dcookie": 212, "kexec_load": 246,
            "io_setup": 206, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
            "perf_event_open": 298, "name_to_handle_at": 303, "open_by_handle_at": 304,
            "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
            "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
            **_SAME_EVERYWHERE,
        },
        clone=56, sockets=(41, 53), ioctl=16, foreign_from=0x40000000,
    ),
    "aarch64": Machine(
        audit=0xC00000B7,
        denied={
            "io_setup": 0, "lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41,
            "quotactl": 60, "acct": 89, "unshare": 97, "kexec_load": 104, "init_module": 105,
            "delete_module": 106, "syslog": 116, "ptrace": 117, "reboot": 142, "add_key": 217,
            "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225,
            "perf_event_open": 241, "name_to_handle_at": 264, "open_by_handle_at": 265,
            "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
            "finit_module": 273, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
            **_SAME_EVERYWHERE,
        },
        clone=220, sockets=(198, 199), ioctl=29,
    ),
}  # fmt: skip


def program(machine: str) -> bytes | None:
    """The filter for an architecture as `platform.machine()` names it; None: none is known.

    `clone3` answers "no such call", since a filter cannot look at its arguments; C libraries then
    fall back to `clone`, whose flags it can see.
    """
    numbers = MACHINES.get(machine)
    if numbers is None:
        return None
    out = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, numbers.audit, 1, 0), _step(_RETURN, _KILL)]
    out.append(_step(_LOAD, _NUMBER))
    if numbers.foreign_from is not None:
        out += [_step(_AT_LEAST, numbers.foreign_from, 0, 1), _fail(errno.ENOSYS)]
    out += [_step(_EQUAL, _CLONE3, 0, 1), _fail(errno.ENOSYS)]
    for number in numbers.denied.values():
        out += [_step(_EQUAL, number, 0, 1), _fail(errno.EPERM)]
    out += _only_when(numbers.clone, _FIRST, [
        _step(_ANY_BIT, NEW_NAMESPACES, 0, 1), _fail(errno.EPERM), _step(_RETURN, _ALLOW),
    ])  # fmt: skip
    families = [
        step for f in SOCKET_FAMILIES for step in (_step(_EQUAL, f, 0, 1), _step(_RETURN, _ALLOW))
    ]
    for number in numbers.sockets:
        out += _only_when(number, _FIRST, [*families, _fail(errno.EAFNOSUPPORT)])
    requests = [
        step for r in TERMINAL_INJECTION for step in (_step(_EQUAL, r, 0, 1), _fail(errno.EPERM))
    ]
    out += _only_when(numbers.ioctl, _SECOND, [*requests, _step(_RETURN, _ALLOW)])
    out.append(_step(_RETURN, _ALLOW))
    return b"".join(out)


def profile(machine: str) -> dict[str, Any] | None:
    """The same filter as a profile for docker and podman (docs.docker.com, "Seccomp security
    profiles"); libseccomp ends calls under a foreign convention. A socket family is compared in 64
    bits, so one that is widened is refused; other arguments are compared as the kernel reads them.
    """
    numbers = MACHINES.get(machine)
    if numbers is None:
        return None
    others = set(range(max(SOCKET_FAMILIES))) - set(SOCKET_FAMILIES)
    bits = [1 << bit for bit in range(32) if NEW_NAMESPACES >> bit & 1]
    rules = [
        _rule([*numbers.denied], errno.EPERM),
        _rule(["clone3"], errno.ENOSYS),
        *(_rule(["clone"], errno.EPERM, _masked(0, bit, bit)) for bit in bits),
        *(_rule(["ioctl"], errno.EPERM, _masked(1, _LOW, one)) for one in TERMINAL_INJECTION),
    ]
    wanted = [{"value": family, "op": "SCMP_CMP_EQ"} for family in sorted(others)]
    wanted.append({"value": max(SOCKET_FAMILIES), "op": "SCMP_CMP_GT"})
    rules += [
        _rule(["socket", "socketpair"], errno.EAFNOSUPPORT, {"index": 0, **one}) for one in wanted
    ]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": [f"SCMP_ARCH_{machine.upper()}"],
        "syscalls": rules,
    }


_LOW = 0xFFFFFFFF


def _rule(names: list[str], number: int, *arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number, "args": list(arguments)
    }  # fmt: skip


def _masked(index: int, mask: int, wanted: int) -> dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": wanted, "op": "SCMP_CMP_MASKED_EQ"}


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One `struct sock_filter`."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _fail(number: int) -> bytes:
    return _step(_RETURN, _FAIL | number)


def _only_when(call: int, offset: int, steps: list[bytes]) -> list[bytes]:
    """Steps over the argument at `offset`, skipped whole for every other call."""
    return [_step(_EQUAL, call, 0, len(steps) + 1), _step(_LOAD, offset), *steps]
