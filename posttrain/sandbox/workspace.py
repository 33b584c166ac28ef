"""Files of a folder that a policy filled, read and written without following any link.

The folder is given by descriptor, so no path leads to it.
Every component is opened relative to the one before it with `O_NOFOLLOW` (open(2)), so neither a
link nor a rename during the walk leads out. Not a copier of trees. The one thing that must stay
true: only regular files beneath the folder are ever read or written, and no open can block.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
_DEEPEST = 64
_LONGEST = 1_024
"""Characters of a folder's path: a list of 4,096 entries must fit into one frame."""
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
    pending: list[tuple[str, ...]] = [()]
    while pending:
        parts = pending.pop()
        with contextlib.suppress(OSError), _folder(root, parts) as folder:
            for name in os.listdir(folder):
                if len(found) == max_entries:
                    return found
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                path = "/".join((*parts, name))
                text = os.fsencode(path).decode("utf-8", "backslashreplace")
                kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other")
                if kind == "folder" and (len(parts) >= _DEEPEST or len(text) > _LONGEST):
                    kind = "other"
                found.append((text, kind, stat.S_IMODE(status.st_mode), status.st_size))
                if kind == "folder":
                    pending.append((*parts, name))
    return found


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


def sweep(root: int) -> None:
    """Remove what is neither file, folder nor link: a reader that opened a pipe would hang."""
    pending: list[tuple[str, ...]] = [()]
    while pending:
        parts = pending.pop()
        with contextlib.suppress(OSError), _folder(root, parts) as folder:
            for name in os.listdir(folder):
                kind = stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
                if kind == stat.S_IFDIR:
                    pending.append((*parts, name))
                elif kind not in _KINDS:
                    os.unlink(name, dir_fd=folder)


def _first(leaf: int, max_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < max_bytes:
        piece = os.read(leaf, min(1 << 20, max_bytes - len(data)))
        if not piece:
            break
        data += piece
    return bytes(data)


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
