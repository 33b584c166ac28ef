"""Runs in a container of its own beside a sandbox's commands and keeps their files.

It is the first process there: it makes the folders of the disk, copies a sealed disk into it where
one is shown at `/over`, and then reads, writes and seals for whoever holds the line, its standard
input and output. No command of a policy ever runs here; the disk is all that both sides see, and
it outlives the commands' container. The one thing that must stay true: every order is answered, and
the process ends with its line.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.sandbox import kernel, spec, wire, workspace

DISK, OVER = "/disk", "/over"
NOTHING = "empty"
"""Folder of the disk with an empty `folder` and an empty `file`, to cover what is hidden."""
UNFOLLOWED = "/not-followed/"
"""What links of a sealed disk lead to, beneath which nothing is: a link that a policy left must not
lead a checker to the checker's own files. What goes on over the disk has them as they were.
"""


def main() -> None:
    """The vault's whole life; the argument is the user number of the commands."""
    try:
        kernel.become(int(sys.argv[1]), keep=kernel.CAP_DAC_OVERRIDE)
        _furnish()
        root = os.open(f"{DISK}/{spec.WRITABLE[0]}", os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        _answer({"id": 0, "error": str(error)})
        return
    _answer({"id": 0})
    decoder = wire.Decoder()
    while data := os.read(0, 1 << 18):
        for frame in decoder.feed(data):
            try:
                head, body = _serve(root, frame.head, frame.body)
            except Exception as error:  # The boundary of this process.
                head, body = wire.failure(error), b""
            _answer({**head, "id": frame.head["id"]}, body)


def _answer(head: Mapping[str, Any], body: bytes = b"") -> None:
    view = memoryview(wire.encode(head, body))
    while view:
        view = view[os.write(1, view) :]


def _furnish() -> None:
    os.umask(0o022)
    for part in (*spec.WRITABLE, NOTHING, f"{NOTHING}/folder"):
        os.mkdir(f"{DISK}/{part}")
    os.close(os.open(f"{DISK}/{NOTHING}/file", os.O_CREAT | os.O_WRONLY, 0o644))
    for part in spec.WRITABLE:
        if os.path.isdir(f"{OVER}/{part}"):
            workspace.copy(f"{OVER}/{part}", f"{DISK}/{part}")
    _turn_links(away=False)


def _serve(root: int, head: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    match head["op"]:
        case "kinds":
            return {"kinds": [_kind(root, parts) for parts in head["paths"]]}, b""
        case "enter":
            workspace.open_up(root)
        case "use":
            used, full = workspace.use(root)
            return {"bytes": used, "full": full}, b""
        case "seal":
            workspace.open_up(root)
            workspace.sweep(root)
            _turn_links(away=True)
        case _:
            return workspace.serve(root, head, body)
    return {}, b""


def _kind(root: int, parts: Sequence[str]) -> str:
    """What is at a path, no link followed: `folder`, `file`, or empty where there is nothing."""
    try:
        with workspace.handle(root, parts) as number:
            return "folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file"
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return ""


def _turn_links(*, away: bool) -> None:
    """Turn every link of the disk away from where it leads, or back. One that would become too long
    for a link goes.
    """
    for part in spec.WRITABLE:
        top = os.open(f"{DISK}/{part}", os.O_RDONLY | os.O_DIRECTORY)
        try:
            for folder, name in _links(top):
                old = os.readlink(name, dir_fd=folder)
                os.unlink(name, dir_fd=folder)
                with contextlib.suppress(OSError):
                    new = UNFOLLOWED + old if away else old.removeprefix(UNFOLLOWED)
                    os.symlink(new, name, dir_fd=folder)
        finally:
            os.close(top)


def _links(top: int) -> Iterator[tuple[int, str]]:
    for folder, _, name in workspace.walk(top, into=lambda path, name: True):
        with contextlib.suppress(OSError):
            if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
                yield folder, name
