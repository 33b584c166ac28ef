"""Copies a tree that a policy filled, in which nothing moves.

The one thing that must stay true: a copy needs no more room than what it is made of: holes stay
holes, and links of one file links of one file.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator

_DEEPEST, _LONGEST = 200, 3_000


def copy(source: str, target: str) -> None:
    """Copy what is in a folder to another one, links as links.

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
    deep = folder.count("/") > _DEEPEST or len(os.fsencode(folder)) > _LONGEST
    kinds = {name: stat.S_IFMT(os.lstat(f"{folder}/{name}").st_mode) for name in names}
    wanted = {stat.S_IFREG, stat.S_IFLNK, *(() if deep else (stat.S_IFDIR,))}
    return {name for name, kind in kinds.items() if kind not in wanted}


def _copy(source: str, target: str, made: dict[int, str]) -> None:
    """Copy a file; holes stay holes and links links, or a copy could need more room than there is.
    `made` tells what was made of each file so far.
    """
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
