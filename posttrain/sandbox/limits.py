"""Limits as values: output caps, process limits, and where control groups may be made.

Pure: nothing here reads a file or starts a process. The one thing that must stay true: output kept
of a stream never passes its cap, and what was left out is said in the text itself.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import PurePosixPath

from posttrain.core.task import Environment

MAX_OPEN_FILES = 1024
MAX_CPU_S = 3_600
"""Of a process. No command's time limit: what a command leaves behind lives on, and threads use
several seconds of processors in one. The time of a whole tree is bounded by its group.
"""
MAX_QUEUED_SIGNALS = 512
"""Of a sandbox; the kernel bounds those of all of a host user's sandboxes together as well."""


class Clip:
    r"""Collects one output stream, keeping its head and its tail within a cap in bytes.

    >>> clip = Clip(10); clip.feed(b"0123456789abcdef"); clip.truncated
    True
    >>> clip.text()
    '01234\n[... 6 of 16 bytes left out ...]\nbcdef'
    """

    def __init__(self, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self._head_bytes = cap_bytes // 2
        self._tail_bytes = cap_bytes - self._head_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self.total_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total_bytes += len(data)
        room = self._head_bytes - len(self._head)
        self._head += data[:room]
        self._tail += data[room:][-self._tail_bytes :] if self._tail_bytes else b""
        if len(self._tail) > 2 * self._tail_bytes:
            del self._tail[: -self._tail_bytes]

    @property
    def truncated(self) -> bool:
        """Whether the stream passed the cap."""
        return self.total_bytes > self._cap_bytes

    def text(self) -> str:
        """The stream as text; bytes that are not UTF-8 become U+FFFD, none of them at the cut."""
        if not self.truncated:
            return bytes(self._head + self._tail).decode("utf-8", "replace")
        tail = bytes(self._tail[-self._tail_bytes :]) if self._tail_bytes else b""
        skip = next((i for i, byte in enumerate(tail[:3]) if byte & 0xC0 != 0x80), 3)
        head = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(self._head))
        left_out = self.total_bytes - len(self._head) - len(tail)
        note = f"\n[... {left_out} of {self.total_bytes} bytes left out ...]\n"
        return head + note + tail[skip:].decode("utf-8", "replace")


def process_limits(environment: Environment) -> dict[str, int]:
    """Limits of every process of a command, by their names in `resource`. `RLIMIT_NPROC` counts
    within the sandbox's own user namespace, where its first process and the command's usher are
    as well.

    >>> process_limits(Environment(max_processes=7))["RLIMIT_NPROC"]
    9
    """
    return {
        "RLIMIT_AS": environment.memory_bytes,
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": MAX_CPU_S,
        "RLIMIT_FSIZE": environment.disk_bytes,
        "RLIMIT_MEMLOCK": 64 << 10,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_NOFILE": MAX_OPEN_FILES,
        "RLIMIT_NPROC": environment.max_processes + 2,
        "RLIMIT_SIGPENDING": MAX_QUEUED_SIGNALS,
    }


# --- control groups ---------------------------------------------------------------------------

_PERIOD_US = 100_000
"""In which a quota of processor time is given anew: the kernel's default (sched-bwc.rst)."""
_LEAST_QUOTA_US = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupPlace:
    """Where groups for sandboxes could be made: below these folders (the same one on v2)."""

    version: int
    """1 or 2."""
    memory: str
    pids: str
    cpu: str | None = None
    """None: processor time cannot be limited."""
    freezer: str | None = None
    """Of the v2 hierarchy, which v1 machines may have beside the others; None: groups cannot be
    frozen.
    """

    @property
    def folders(self) -> tuple[str, ...]:
        """The distinct folders."""
        found = (self.memory, self.pids, self.cpu, self.freezer)
        return tuple(dict.fromkeys(folder for folder in found if folder is not None))

    @property
    def entrances(self) -> tuple[str, ...]:
        """Files that a process writes to for joining."""
        return tuple(f"{folder}/cgroup.procs" for folder in self.folders)

    @property
    def deaths(self) -> str:
        """File that counts processes killed for want of memory, as `oom_kill N`."""
        return f"{self.memory}/{'memory.oom_control' if self.version == 1 else 'memory.events'}"

    @property
    def usage(self) -> tuple[str, str]:
        """Files of the memory and the number of processes in use."""
        file = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        return f"{self.memory}/{file}", f"{self.pids}/pids.current"

    def below(self, name: str) -> CgroupPlace:
        """The place of a group of that name."""
        return CgroupPlace(
            version=self.version, memory=f"{self.memory}/{name}", pids=f"{self.pids}/{name}",
            cpu=None if self.cpu is None else f"{self.cpu}/{name}",
            freezer=None if self.freezer is None else f"{self.freezer}/{name}",
        )  # fmt: skip

    def settings(self, *, memory_bytes: int, max_processes: int) -> dict[str, str]:
        """File → text that limits a group at this place; one process is granted to the usher."""
        file = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        return {
            f"{self.memory}/{file}": str(memory_bytes),
            f"{self.pids}/pids.max": str(max_processes + 1),
        }

    def quota(self, cores: float) -> dict[str, str]:
        """File → text that limits the group's processor time; nothing where it cannot be."""
        if self.cpu is None:
            return {}
        quota_us = max(_LEAST_QUOTA_US, round(cores * _PERIOD_US))
        if self.version == 1:
            return {f"{self.cpu}/cpu.cfs_quota_us": str(quota_us)}
        return {f"{self.cpu}/cpu.max": f"{quota_us} {_PERIOD_US}"}

    def further_settings(self, *, memory_bytes: int) -> dict[str, str]:
        """File → text where the kernel has that file: nothing may be swapped out instead, and v1
        counts the buffers of internet sockets apart.
        """
        if self.version == 2:
            return {f"{self.memory}/memory.swap.max": "0"}
        return {
            f"{self.memory}/memory.memsw.limit_in_bytes": str(memory_bytes),
            f"{self.memory}/memory.kmem.tcp.limit_in_bytes": str(memory_bytes),
        }


def oom_kills(text: str) -> int:
    r"""The count in the text of `CgroupPlace.deaths`.

    >>> oom_kills("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    3
    """
    counts = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return int(counts.get("oom_kill", 0))


def cgroup_places(own: str, mountinfo: str) -> tuple[CgroupPlace, ...]:
    """Candidates, best first, from the texts of `/proc/self/cgroup` and `/proc/self/mountinfo`.

    On v1 (and hybrid) that is our own group of each controller, with that of the v2 hierarchy where
    there is one. On v2 it is our own group and then its ancestors, since a group that holds
    processes cannot hand controllers to children (Linux `admin-guide/cgroup-v2.rst`, "No Internal
    Process Constraint"); never outside the mount.
    """
    groups = _groups(own)
    v1 = {
        controller: folder
        for controller in ("memory", "pids", "cpu")
        for root, point, kind, options in _cgroup_mounts(mountinfo)
        if kind == "cgroup" and controller in options and controller in groups
        if (folder := _below_mount(groups[controller], root, point)) is not None
    }
    unified = []
    for root, point, kind, _ in _cgroup_mounts(mountinfo):
        folder = _below_mount(groups.get("", "/"), root, point) if kind == "cgroup2" else None
        while folder is not None and PurePosixPath(folder).is_relative_to(point):
            unified.append(folder)
            folder = str(PurePosixPath(folder).parent)
    if {"memory", "pids"} <= v1.keys():
        freezers = (*unified[:1], None)
        return tuple(CgroupPlace(version=1, **v1, freezer=freezer) for freezer in freezers)
    return tuple(
        CgroupPlace(version=2, memory=folder, pids=folder, cpu=folder, freezer=folder)
        for folder in unified
    )


def _groups(own: str) -> dict[str, str]:
    """Controller → path of our group; '' for the v2 hierarchy."""
    groups = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _cgroup_mounts(mountinfo: str) -> list[tuple[str, str, str, list[str]]]:
    """(root, mount point, type, super options) of the control group mounts (proc(5))."""
    mounts = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if tail and tail[0] in ("cgroup", "cgroup2"):
            mounts.append((fields[3], fields[4], tail[0], tail[2].split(",")))
    return mounts


def _below_mount(path: str, root: str, point: str) -> str | None:
    """Where a group's path is seen under a mount whose root may itself be a group."""
    pure = PurePosixPath(path)
    if not pure.is_relative_to(root):
        return None
    return str(PurePosixPath(point) / pure.relative_to(root))
