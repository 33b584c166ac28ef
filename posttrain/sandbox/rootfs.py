"""The root of a sandbox's file system but for what is mounted on it: the same for every driver.

The host's /usr is shown, /etc is ours, nothing else of the host is there. The one thing that must
stay true: what is written here depends on the host's system folders only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from posttrain.sandbox import spec


def system_folders() -> dict[str, str]:
    """Host's /usr and the top-level folders that lead to it: link target, or '' for a folder."""
    found = {"/usr": ""}
    for folder in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(folder):
            found[folder] = os.readlink(folder)
        elif os.path.isdir(folder):
            found[folder] = ""
    return found


def furnish_etc(folder: str, uid: int) -> None:
    """Fill an empty folder with the sandbox's /etc."""
    for name, text in spec.etc_files(uid).items():
        Path(folder, name).write_text(text)
    with contextlib.suppress(OSError):
        shutil.copyfile("/etc/ld.so.cache", f"{folder}/ld.so.cache")
    os.mkdir(f"{folder}/alternatives")
    with contextlib.suppress(OSError):
        for link in os.scandir("/etc/alternatives"):
            if link.is_symlink():
                os.symlink(os.readlink(link.path), f"{folder}/alternatives/{link.name}")


def build(folder: str, uid: int, *, points: tuple[str, ...]) -> None:
    """A whole root in a folder: mount points (`points` besides those every container has), links of
    the system, and /etc.
    """
    for point in ("proc", "sys", "dev", "run", "tmp", "etc", *points):
        os.makedirs(f"{folder}/{point}", exist_ok=True)
    Path(folder, "run", ".containerenv").touch()
    os.symlink("/proc/mounts", f"{folder}/etc/mtab")
    furnish_etc(f"{folder}/etc", uid)
    for name, target in system_folders().items():
        if target:
            os.symlink(target, f"{folder}{name}")
        else:
            os.makedirs(f"{folder}{name}", exist_ok=True)
