"""Control groups around sandboxes: one group a run of the holder, one below it a lease.

Thin: `limits.cgroup_places` says where groups could be; this makes and removes them. Where none can
be made, limits hold a process each (`resource` limits) instead of a whole tree, and the driver says
so. The one thing that must stay true: a group whose maker is gone is removed at the next start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.sandbox import limits
from posttrain.sandbox.limits import CgroupPlace

_PREFIX = "posttrain-"
_HOLDER = "holder"


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


def oom_kills(group: CgroupPlace) -> int:
    """How many processes of a group were killed for want of memory so far."""
    try:
        return limits.oom_kills(Path(group.deaths).read_text())
    except OSError:
        return 0


def usage(group: CgroupPlace) -> tuple[int, int]:
    """Bytes of memory and processes in use, the usher included.

    Raises:
        OSError: it could not be read.
    """
    memory, processes = (int(Path(file).read_text()) for file in group.usage)
    return memory, processes


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
