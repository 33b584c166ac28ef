"""Files of a folder that a policy filled, read, written and copied without following any link.

The folder is given by descriptor, so no path leads to it, but for a copy, made while nothing moves.
Every component is opened relative to the one before it with `O_NOFOLLOW` (open(2)), so neither a
link nor a rename during the walk leads out. The one thing that must stay true: only regular files
beneath the folder are ever read or written, and no open can block.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from posttrain.core.errors import SandboxError

_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
_DEEPEST = 64
_LONGEST = 1_024
"""Characters of a folder's path: a list of 4,096 entries must fit into one frame."""
_DEEPEST_COPY, _LONGEST_COPY = 200, 3_000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LEAF = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def read(root: int, parts: Sequence[str], *, max_bytes: int) -> bytes | None:
    """The first `max_bytes` of a regular file; None where there is none without passing a link."""
    try:
        with _folder(root, parts[:-1]) as folder, _open(parts[-1], os.O_RDONLY, folder) as leaf:
            return _first(leaf, max_bytes)
    except OSError:
        return None


def entries(root: int, *, max_entries: int) -> list[tuple[str, str, int, int]]:
    """Path, kind, permission bits and size of everything beneath the folder, links not followed.

    A folder nested `_DEEPEST` deep, or with a path over `_LONGEST`, is not looked into, and is
    called `other`.
    """
    found: list[tuple[str, str, int, int]] = []
    for folder, path, name in walk(root, into=_is_near):
        if len(found) == max_entries:
            break
        mode, size = _status(folder, name)
        kind = _KINDS.get(stat.S_IFMT(mode), "other")
        if kind == "folder" and not _is_near(path, name):
            kind = "other"
        found.append((_text(path, name), kind, stat.S_IMODE(mode), size))
    return found


def _is_near(path: Sequence[str], name: str) -> bool:
    return len(path) < _DEEPEST and len(_text(path, name)) <= _LONGEST


def _text(path: Sequence[str], name: str) -> str:
    return os.fsencode("/".join((*path, name))).decode("utf-8", "backslashreplace")


def _status(folder: int, name: str) -> tuple[int, int]:
    """Mode and size of an entry; zeros where it cannot be looked at."""
    with contextlib.suppress(OSError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return status.st_mode, status.st_size
    return 0, 0


def write(root: int, parts: Sequence[str], data: bytes) -> None:
    """Write a regular file, making its folders.

    Raises:
        OSError: no room, or something that is no folder (or no regular file) is in the way.
    """
    for depth in range(1, len(parts)):
        with _folder(root, parts[: depth - 1]) as folder, contextlib.suppress(FileExistsError):
            os.mkdir(parts[depth - 1], 0o755, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT
    with _folder(root, parts[:-1]) as folder, _open(parts[-1], flags, folder) as leaf:
        os.ftruncate(leaf, 0)
        view = memoryview(data)
        while view:
            view = view[os.write(leaf, view) :]


def serve(root: int, head: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Answer a request to read, write or list (`wire`)."""
    match head["op"]:
        case "read":
            data = read(root, head["parts"], max_bytes=head["max_bytes"])
            return {"found": data is not None}, data or b""
        case "entries":
            return {"entries": entries(root, max_entries=head["max_entries"])}, b""
        case "write":
            write(root, head["parts"], body)
            return {}, b""
        case unknown:
            raise SandboxError(f"nobody here knows an operation {unknown!r}.")


def open_up(root: int) -> None:
    """Let its owner in, before every command: a policy that shut itself out must not thereby keep
    the next command, the sealing or a checker from working.
    """
    os.fchmod(root, 0o755)


def use(root: int) -> tuple[int, bool]:
    """Bytes that the file system holds, and whether no block or no file is left on it."""
    disk = os.fstatvfs(root)
    used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    return used, disk.f_bavail == 0 or disk.f_favail == 0


def sweep(root: int) -> None:
    """Remove what is neither file, folder nor link (a reader that opened a pipe would hang, and an
    overlay takes a device 0/0 for a deletion), and the attributes by which an overlay would take a
    file for something else (`user.overlay.*`, kernel: filesystems/overlayfs.rst).
    """
    _unmark(f"/proc/self/fd/{root}/.")
    for folder, _, name in walk(root, into=lambda path, name: True):
        with contextlib.suppress(OSError):
            if stat.S_IFMT(_status(folder, name)[0]) in _KINDS:
                _unmark(f"/proc/self/fd/{folder}/{name}")
            else:
                os.unlink(name, dir_fd=folder)


def _unmark(place: str) -> None:
    for name in os.listxattr(place, follow_symlinks=False):
        if name.startswith("user.overlay."):
            os.removexattr(place, name, follow_symlinks=False)


Into = Callable[[Sequence[str], str], bool]


def walk(root: int, *, into: Into) -> Iterator[tuple[int, Sequence[str], str]]:
    """Everything beneath a folder in which nothing moves, links not followed: the descriptor and
    path of the folder it is in, and its name. Only folders that `into` wants are looked into. Each
    is opened once and from its neighbour, so depth costs nothing.
    """
    here, path, left = os.dup(root), list[str](), list[list[str]]()
    try:
        while True:
            left.append([])
            for name in os.listdir(here):
                yield here, path, name
                if stat.S_ISDIR(_status(here, name)[0]) and into(path, name):
                    left[-1].append(name)
            entered = False
            while not entered:
                while not left[-1]:
                    left.pop()
                    if not left:
                        return
                    here = _gone(here, "..")
                    path.pop()
                name = left[-1].pop()
                with contextlib.suppress(OSError):
                    here, entered = _gone(here, name), True
                    path.append(name)
    finally:
        os.close(here)


def _gone(here: int, name: str) -> int:
    """The descriptor of the folder that is called so from here, which is closed."""
    there = os.open(name, _FOLDER, dir_fd=here)
    os.close(here)
    return there


def _first(leaf: int, max_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < max_bytes:
        piece = os.read(leaf, min(1 << 20, max_bytes - len(data)))
        if not piece:
            break
        data += piece
    return bytes(data)


@contextlib.contextmanager
def handle(root: int, parts: Sequence[str]) -> Iterator[int]:
    """Descriptor that names what is at a path without opening it (O_PATH).

    Raises:
        OSError: there is nothing, or a link on the way.
    """
    with _folder(root, parts[:-1]) as folder:
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        number = os.open(parts[-1], flags, dir_fd=folder)
    try:
        if stat.S_ISLNK(os.fstat(number).st_mode):
            raise OSError(errno.ELOOP, "a link", parts[-1])
        yield number
    finally:
        os.close(number)


@contextlib.contextmanager
def _folder(root: int, parts: Sequence[str]) -> Iterator[int]:
    """Descriptor of a folder beneath `root`."""
    folder = os.dup(root)
    try:
        for part in parts:
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def _open(name: str, flags: int, folder: int) -> Iterator[int]:
    """Descriptor of a regular file."""
    leaf = os.open(name, flags | _LEAF, 0o644, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(leaf).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        yield leaf
    finally:
        os.close(leaf)


# --- copies -----------------------------------------------------------------------------------


def copy(source: str, target: str) -> None:
    """Copy what is in a folder to another one, links as links. It needs no more room than what it
    is made of: holes stay holes, and links of one file links of one file.

    Raises:
        OSError: not all could be copied.
    """
    made = dict[int, str]()
    try:
        shutil.copytree(
            source, target, symlinks=True, dirs_exist_ok=True, ignore=_left_out,
            copy_function=lambda one, other: _copy(one, other, made),
        )  # fmt: skip
    except shutil.Error as error:
        raise OSError(errno.EIO, f"not all could be copied: {error.args[0][:3]}") from error


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Of a copy: pipes and sockets, which are nothing without their processes, and folders that lie
    too deep for a path.
    """
    deep = folder.count("/") > _DEEPEST_COPY or len(os.fsencode(folder)) > _LONGEST_COPY
    kinds = {name: stat.S_IFMT(os.lstat(f"{folder}/{name}").st_mode) for name in names}
    wanted = {stat.S_IFREG, stat.S_IFLNK, *(() if deep else (stat.S_IFDIR,))}
    return {name for name, kind in kinds.items() if kind not in wanted}


def _copy(source: str, target: str, made: dict[int, str]) -> None:
    """Copy a file; `made` tells what was made of each so far."""
    status = os.lstat(source)
    if status.st_ino in made:
        os.link(made[status.st_ino], target)
        return
    made[status.st_ino] = target
    with open(source, "rb", buffering=0) as old, open(target, "wb", buffering=0) as new:
        for start, end in _pieces(old.fileno()):
            new.seek(start)
            while start < end:
                start += os.sendfile(new.fileno(), old.fileno(), start, end - start)
        new.truncate(status.st_size)
    shutil.copystat(source, target)


def _pieces(file: int) -> Iterator[tuple[int, int]]:
    """Start and end of what is no hole (lseek(2))."""
    end = 0
    while True:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(file, start, os.SEEK_HOLE)
        yield start, end
