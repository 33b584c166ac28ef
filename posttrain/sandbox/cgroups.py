"""Control groups around sandboxes: one group a run of the holder, one below it a lease.

Where none can be made, limits hold a process each (`resource` limits) instead of a whole tree, and
the driver says so. The one thing that must stay true: a group whose maker is gone is removed at the
next start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

_PREFIX = "posttrain-"
_HOLDER = "holder"
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

    # --- what is in it ------------------------------------------------------------------------

    def oom_kills(self) -> int:
        """How many of its processes were killed for want of memory so far."""
        file = "memory.oom_control" if self.version == 1 else "memory.events"
        with contextlib.suppress(OSError):
            for line in Path(self.memory, file).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def usage(self) -> tuple[int, int]:
        """Bytes of memory and processes in use, the usher included.

        Raises:
            OSError: it could not be read.
        """
        file = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        memory, processes = Path(self.memory, file), Path(self.pids, "pids.current")
        return int(memory.read_text()), int(processes.read_text())


def make(places: Sequence[CgroupPlace], owner: int) -> CgroupPlace | None:
    """A group for this process's sandboxes at the first place that allows one, given to the user
    `owner`; None where no place does. A place that does not limit processor time is better than
    none. In the v2 hierarchy this process moves into it (cgroup-v2.rst, "Delegation": whoever moves
    a process must own the common ancestor).
    """
    for place in places:
        _sweep(place)
        for wanted in dict.fromkeys((place, replace(place, cpu=None))):
            top = wanted.below(f"{_PREFIX}{os.getpid()}")
            try:
                _make_top(wanted, top, owner)
            except OSError:
                remove(top)
                continue
            return top
    return None


def _make_top(place: CgroupPlace, top: CgroupPlace, owner: int) -> None:
    controllers = ("memory", "pids", *(("cpu",) if place.cpu else ()))
    if place.version == 2:
        enabled = Path(place.memory, "cgroup.subtree_control").read_text().split()
        if not set(controllers) <= set(enabled):
            raise OSError(f"{place.memory} hands its children not all of {controllers}")
    for folder in top.folders:
        os.mkdir(folder)
        os.chown(folder, owner, owner)
    for file in top.quota(1.0):
        os.stat(file)  # A kernel may have the controller and no bandwidth control.
    if top.version == 1:  # Counting socket buffers is switched on here, not with every lease.
        _set_existing(top.further_settings(memory_bytes=-1))
    else:
        wanted = " ".join(f"+{name}" for name in controllers)
        Path(top.memory, "cgroup.subtree_control").write_text(wanted)
    if top.freezer is not None:
        os.chown(f"{top.freezer}/cgroup.procs", owner, owner)
        os.mkdir(f"{top.freezer}/{_HOLDER}")
        os.chown(f"{top.freezer}/{_HOLDER}/cgroup.procs", owner, owner)
        Path(top.freezer, _HOLDER, "cgroup.procs").write_text(str(os.getpid()))


def give_up(top: CgroupPlace, home: CgroupPlace) -> None:
    """Remove a group and those below it once nobody but this process uses them, which goes back to
    its group at `home`, where it was before.
    """
    if home.freezer is not None:
        with contextlib.suppress(OSError):
            Path(home.freezer, "cgroup.procs").write_text(str(os.getpid()))
    remove(top, patience_s=2.0)


def make_lease(
    top: CgroupPlace, name: str, *, memory_bytes: int, max_processes: int, cores: float
) -> None:
    """A limited group below the holder's."""
    group = top.below(name)
    for folder in group.folders:
        os.mkdir(folder)
    settings = group.settings(memory_bytes=memory_bytes, max_processes=max_processes)
    for file, text in settings.items():
        Path(file).write_text(text)
    _set_existing(group.further_settings(memory_bytes=memory_bytes))
    for file, text in group.quota(cores).items():
        try:
            Path(file).write_text(text)
        except OSError as error:
            if error.errno != errno.EINVAL:  # v1: a group above allows less already.
                raise


def _set_existing(settings: Mapping[str, str]) -> None:
    for file, text in settings.items():
        if os.path.exists(file):
            Path(file).write_text(text)


def freeze(freezer: str) -> None:
    """Begin to bring all members of a group to a stand, those that are born meanwhile too."""
    Path(freezer, "cgroup.freeze").write_text("1")


def thaw(freezer: str) -> None:
    """Let them go on."""
    Path(freezer, "cgroup.freeze").write_text("0")


def stands_still(freezer: str) -> bool:
    """Whether no member of a group that is being frozen moves any more."""
    return "frozen 1\n" in Path(freezer, "cgroup.events").read_text()


def remove(group: CgroupPlace, *, patience_s: float = 0.0) -> None:
    """Remove a group and those below it. Dying members keep a group busy for a moment, which is
    waited for; what is still there then is swept at the next start.
    """
    until = time.monotonic() + patience_s
    for folder in group.folders:
        while os.path.isdir(folder) and not _remove_folder(folder) and time.monotonic() < until:
            time.sleep(0.005)


def _remove_folder(folder: str) -> bool:
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                os.rmdir(entry.path)
        os.rmdir(folder)
        return True
    return False


def _sweep(place: CgroupPlace) -> None:
    """Remove groups whose maker is dead."""
    for folder in place.folders:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                maker = name.removeprefix(_PREFIX)
                if maker != name and maker.isdigit() and not os.path.exists(f"/proc/{maker}"):
                    _remove_folder(f"{folder}/{name}")


# --- where groups are -------------------------------------------------------------------------


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
    unified = [
        folder
        for root, point, kind, _ in _cgroup_mounts(mountinfo)
        if kind == "cgroup2"
        for folder in _upward(_below_mount(groups.get("", "/"), root, point), point)
    ]
    if {"memory", "pids"} <= v1.keys():
        freezers = (*unified[:1], None)
        return tuple(CgroupPlace(version=1, **v1, freezer=freezer) for freezer in freezers)
    return tuple(
        CgroupPlace(version=2, memory=folder, pids=folder, cpu=folder, freezer=folder)
        for folder in unified
    )


def memory_limit(own: str, mountinfo: str) -> int | None:
    """Bytes of memory that our own group and those above it allow this process, as far as they can
    be seen, from the same texts; None where nothing limits it.
    """
    groups, found = _groups(own), []
    for root, point, kind, options in _cgroup_mounts(mountinfo):
        controller = "memory" if kind == "cgroup" else ""
        file = "memory.limit_in_bytes" if controller else "memory.max"
        if kind == "cgroup2" or controller in options:
            folder = _below_mount(groups.get(controller, "/"), root, point) or point
            for above in _upward(folder, point):
                with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                    found.append(int(Path(above, file).read_text()))
    return min(found, default=None)


def _upward(folder: str | None, point: str) -> list[str]:
    """A folder and those above it, up to a mount point."""
    if folder is None:
        return []
    pure = PurePosixPath(folder)
    return [str(one) for one in (pure, *pure.parents) if one.is_relative_to(point)]


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
