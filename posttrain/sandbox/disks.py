"""The disks of leases: capped tmpfs, and overlays of them over sealed layers.

Runs in the holder. A disk lives in a mount namespace of its own, always at the same place, so a
command's cost does not grow with the number of leases and closing descriptors frees all. Sealing
makes a disk a layer; disks can be made over it, as many as are wanted. The one thing that must stay
true: a layer never changes again. What an overlay writes to is never beneath another one (the
kernel calls that undefined), so the overlay of a sealed disk goes before anything is stacked on it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from posttrain.core.errors import SandboxError
from posttrain.sandbox import kernel, spec, workspace

BASE = "/tmp"
"""Covered in the holder's own mount namespace; nothing is ever written to the host's."""
DISK, UPPER, ARTEFACTS = f"{BASE}/disk", f"{BASE}/upper", f"{BASE}/artefacts"
_LAYERS = f"{BASE}/l"
_MOUNTS = "/proc/self/ns/mnt"
_WRITABLE = kernel.MS_NOSUID | kernel.MS_NODEV
_GUARDED = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | _WRITABLE
_SEALED = kernel.MS_RDONLY | _WRITABLE | kernel.MS_NOSYMFOLLOW
MOST_LAYERS = 128
"""Their paths have to fit one page of mount options."""


class Place(NamedTuple):
    """A folder of a mount namespace."""

    mounts: int
    """Descriptor of the namespace."""
    path: str


class Layer:
    """A folder that never changes again, in a mount namespace that is kept for it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._users = 1

    def use(self) -> Layer:
        """Another user."""
        self._users += 1
        return self

    def leave(self) -> None:
        """One user less; with the last one it goes."""
        self._users -= 1
        if self._users == 0:
            os.close(self.place.mounts)


@dataclass(slots=True, kw_only=True)
class Disk:
    """One disk: of a sandbox, or sealed."""

    size: spec.Disk
    mounts: int
    """Descriptor of its mount namespace."""
    workspace: int
    """Descriptor of the folder that commands see as their workspace."""
    layers: tuple[Layer, ...]
    """What it lies over, oldest first; of a sealed disk all that it consists of."""
    artefacts: bool
    """Whether a sealed workspace is mounted at `ARTEFACTS`."""
    pinned: set[tuple[str, ...]] = field(default_factory=set)
    """Folders of the workspace that nobody can move any more."""

    @property
    def files(self) -> Place:
        """The workspace."""
        return Place(self.mounts, f"{DISK}/work")

    @property
    def whole(self) -> Place:
        """All that commands can write to."""
        return Place(self.mounts, DISK)

    @property
    def beside(self) -> Place | None:
        """What was mounted beside a disk, sealed meanwhile or not."""
        mounts = self.layers[-1].place.mounts if self.layers else self.mounts
        return Place(mounts, ARTEFACTS) if self.artefacts else None

    def close(self) -> None:
        """Let it go: with its last descriptor the namespace goes, and with that its mounts."""
        for number in (self.workspace, self.mounts):
            if number >= 0:
                os.close(number)
        for layer in self.layers:
            layer.leave()


class Disks:
    """Makes disks. One for each holder."""

    def __init__(self, *, share: bool = True) -> None:
        """Where the kernel's tmpfs lacks what overlays need (user attributes came with Linux 6.6),
        or without `share`, a disk over another begins as a copy of it.
        """
        self._own = os.open(_MOUNTS, os.O_RDONLY)
        self.shares = share and self._can_share()

    @contextlib.contextmanager
    def within(self, mounts: int | None) -> Iterator[None]:
        """Go to a mount namespace (None: a new one) and come back."""
        if mounts is None:
            kernel.unshare(kernel.CLONE_NEWNS)
        else:
            kernel.enter_mounts(mounts)
        try:
            yield
        finally:
            kernel.enter_mounts(self._own)

    def make(
        self, size: spec.Disk, *, over: Disk | None = None, beside: Place | None = None
    ) -> Disk:
        """A writable disk, over what a sealed one holds; `beside` is mounted read-only.

        Raises:
            OSError: the kernel refused. SandboxError: there are too many layers.
        """
        layers = over.layers if over is not None and self.shares else ()
        self.check_depth(len(layers))
        with contextlib.ExitStack() as clones:
            lower = self._clones([layer.place for layer in layers], clones)
            artefacts = self._clones([beside] if beside else [], clones)
            copied = [] if over is None or layers else self._clones([over.whole], clones)
            with self.within(None):
                place = UPPER if layers else DISK
                kernel.mount("tmpfs", place, "tmpfs", _WRITABLE, size.mount_options)
                if layers:
                    for part in ("u", "w"):
                        os.mkdir(f"{UPPER}/{part}")
                    _overlay(lower, f",upperdir={UPPER}/u,workdir={UPPER}/w", _WRITABLE)
                else:
                    for part in spec.WRITABLE:
                        os.mkdir(f"{DISK}/{part}")
                    for clone in copied:
                        _copied(clone)
                for clone in artefacts:
                    _attach(clone, ARTEFACTS)
                mounts, workspace = _opened()
        return Disk(
            size=size, mounts=mounts, workspace=workspace, artefacts=beside is not None,
            layers=tuple(layer.use() for layer in layers),
        )  # fmt: skip

    def check_depth(self, layers: int) -> None:
        """Raises:
        SandboxError: a disk over so many layers is not possible.
        """
        if layers > MOST_LAYERS:
            raise SandboxError(
                f"a sandbox over {layers} snapshots of one another; at most {MOST_LAYERS} work.",
                next_step="snapshot less often, or begin anew from the files that are needed.",
            )

    def guard(self, disk: Disk, path: Sequence[str], *, cover: str | None) -> None:
        """Make what is at a path of the workspace read-only, or cover it with a folder or file that
        is empty. No link is followed. The folders on the way are mounted on themselves, which keeps
        them at their place: whoever renamed one would put something else there.

        Raises:
            OSError: there is nothing.
        """
        ways = (tuple(path[:depth]) for depth in range(1, len(path)))
        with self.within(disk.mounts):
            for way in (way for way in ways if way not in disk.pinned):
                with workspace.handle(disk.workspace, way) as number:
                    place = f"/proc/self/fd/{number}"
                    kernel.mount(place, place, "", kernel.MS_BIND | kernel.MS_REC)
                disk.pinned.add(way)
            for flags in (kernel.MS_BIND | kernel.MS_REC, _GUARDED):
                with workspace.handle(disk.workspace, path) as number:
                    place = f"/proc/self/fd/{number}"
                    is_folder = stat.S_ISDIR(os.fstat(number).st_mode)
                    source = (
                        place if cover is None else f"{cover}/{'folder' if is_folder else 'file'}"
                    )
                    kernel.mount(source, place, "", flags)

    def seal(self, disk: Disk) -> Disk:
        """The same files, read-only for ever and without guards; `disk` itself is used up. Nothing
        may run over it. Not the file system becomes read-only but every mount of it: descriptors
        that processes sent to one another keep it busy for a while after their end.

        Raises:
            OSError: the kernel refused.
        """
        os.close(disk.workspace)
        disk.workspace, path = -1, f"{UPPER}/u" if disk.layers else DISK
        with self.within(disk.mounts):
            if disk.layers:
                kernel.unmount(DISK)
            else:
                kernel.mount("", DISK, "", _GUARDED)
        disk.layers = (*disk.layers, Layer(Place(disk.mounts, path)))
        disk.mounts = -1
        with contextlib.ExitStack() as clones:
            lower = self._clones([layer.place for layer in disk.layers], clones)
            with self.within(None):
                if len(lower) == 1:
                    _attach(lower[0], DISK)
                else:
                    _overlay(lower, "", _SEALED)
                disk.mounts, disk.workspace = _opened()
        return disk

    def _can_share(self) -> bool:
        """Whether overlays over tmpfs work here, in full."""
        try:
            made = self.make(spec.Disk(size_bytes=1 << 20, inodes=64))
            os.setxattr(f"/proc/self/fd/{made.workspace}", "user.posttrain", b"1")
            sealed = self.seal(made)
            self.shares = True
            self.make(sealed.size, over=sealed).close()
            sealed.close()
        except OSError:
            return False
        return True

    def _clones(self, places: Sequence[Place], clones: contextlib.ExitStack) -> list[int]:
        """Detached mounts of folders."""
        found = []
        for place in places:
            with self.within(place.mounts):
                found.append(kernel.clone_mount(place.path))
            clones.callback(os.close, found[-1])
        return found


def _opened() -> tuple[int, int]:
    """Descriptors of the present mount namespace and of the workspace in it."""
    folder = os.open(f"{DISK}/work", os.O_RDONLY | os.O_DIRECTORY)
    return os.open(_MOUNTS, os.O_RDONLY), folder


def _copied(clone: int) -> None:
    """Copy what a clone holds to the disk."""
    place = f"{_LAYERS}/0"
    os.makedirs(place, exist_ok=True)
    _attach(clone, place)
    try:
        workspace.copy(place, DISK)
    finally:
        kernel.unmount(place)


def _attach(clone: int, path: str) -> None:
    """Mount a clone so that nothing is written through it and no link in it is followed."""
    kernel.attach_mount(clone, path)
    kernel.mount("", path, "", kernel.MS_BIND | kernel.MS_REMOUNT | _SEALED)


def _overlay(lower: Sequence[int], upper: str, flags: int) -> None:
    """Mount an overlay at `DISK`, the last of `lower` on top (kernel: filesystems/overlayfs.rst).
    It keeps what it needs of its layers itself. They stay mounted all the same, out of reach, until
    the namespace goes: taking one away makes the kernel wait for all processors, .2 ms each.
    """
    paths = []
    for number, clone in enumerate(lower):
        path = f"{_LAYERS}/{number}"
        os.makedirs(path, exist_ok=True)
        kernel.attach_mount(clone, path)
        paths.append(path)
    options = f"lowerdir={':'.join(reversed(paths))}{upper},userxattr"
    kernel.mount("overlay", DISK, "overlay", flags, options)
