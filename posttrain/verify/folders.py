"""Runs inside a fresh sandbox: the folders that a harness works in, and those that others filled.

Standard library only, copied into the sandbox as text. The one thing that must stay true: nothing
that lies in a folder makes its reader fail, wait, or look elsewhere.
"""

from __future__ import annotations

import os
import stat

from posttrain.verify.nursery import Suppressed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import BinaryIO

MAX_FILE_BYTES = 8 << 20
"""A larger file is read as none."""
WRITABLE = ("/workspace", "/tmp", "/dev/shm")
"""All that a sandbox's processes can write to, where an order `sweeps`; this runs in the first."""


class Folder(str):
    """Path of a folder that an attempt or a candidate filled. Its methods never raise, block or
    lead outside, whatever lies there; nothing may be writing to it.
    """

    def read_bytes(self, path: str) -> bytes | None:
        """Bytes of a regular file, by its path in the folder. None: there is nothing, or a folder,
        a pipe, a link (in any component), something unreadable, or more than 8 MiB.
        """
        with Suppressed(OSError, ValueError):
            place, status = str(self), os.lstat(self)
            for part in path.split("/"):
                place = os.path.join(place, part)
                status = os.lstat(place)
                if part in ("", "..") or stat.S_ISLNK(status.st_mode):
                    return None
            if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_FILE_BYTES:
                with open(place, "rb") as file:
                    return file.read()
        return None

    def read_text(self, path: str) -> str | None:
        """As `read_bytes`; None also where the bytes are no UTF-8."""
        data = self.read_bytes(path)
        try:
            return None if data is None else data.decode()
        except UnicodeDecodeError:
            return None


class Copies(Folder):
    """Files that came with the order. They are read from it; their folder, laid anew for each run,
    is for candidates.
    """

    contents: Mapping[str, bytes] = {}

    def read_bytes(self, path: str) -> bytes | None:
        """As a folder reads them."""
        return self.contents.get(path)


def new_place() -> str:
    """A path in the current folder that nobody foresees."""
    return os.path.join(os.getcwd(), os.urandom(8).hex())


def lay(folder: str, files: Mapping[str, str] | Mapping[str, bytes]) -> None:
    """Make a folder with these files."""
    os.mkdir(folder)
    for path, content in files.items():
        place = os.path.join(folder, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(place, 0o755)


def remove(path: str) -> None:
    """Remove what is there, in as far as it can be."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.rmdir(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError:
        import shutil

        with Suppressed(RecursionError):
            shutil.rmtree(path, ignore_errors=True)


def unnamed() -> BinaryIO:
    """A file in memory: a candidate that fills the disk cannot be in its way."""
    return open(os.memfd_create("ran"), "w+b")


def swept() -> bool:
    """Whether all that can be written to could be emptied."""
    for place in WRITABLE:
        for name in os.listdir(place):
            remove(os.path.join(place, name))
    return not any(map(os.listdir, WRITABLE))


def modes() -> dict[str, tuple[int, list[str]]]:
    """The folders a checker works in, to give back what a candidate may have taken."""
    places = {os.getcwd(), os.environ.get("TMPDIR", "/tmp"), *filter(os.path.isdir, WRITABLE)}
    return {place: _mode(place) for place in places}


def restore(before: Mapping[str, tuple[int, list[str]]]) -> None:
    """Make modes what they were; attributes that were not there go."""
    for place, (mode, names) in before.items():
        if _mode(place) != (mode, names):
            os.chmod(place, mode)
            for name in set(os.listxattr(place)) - set(names):
                os.removexattr(place, name)


def _mode(place: str) -> tuple[int, list[str]]:
    """Mode, and names of attributes where there can be any; access lists are among those."""
    names: list[str] = []
    with Suppressed(OSError):
        names = os.listxattr(place)
    return stat.S_IMODE(os.stat(place).st_mode), names
