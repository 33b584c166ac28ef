"""How the holder comes to be: leave root, make namespaces, choose a bubblewrap; then stay behind.

Three processes: the *keeper*, which the driver starts, makes the control groups (with root's
rights, where it has them) and waits to remove them; the *porter* leaves root and makes the
namespaces; the *holder* is the first process of the process namespace, so that with it the kernel
ends everything
it ever started, whatever state that is in. Each dies with the one before it. The one thing that
must stay true: bubblewrap is never started by host user 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.core.errors import SandboxError
from posttrain.sandbox import cgroups, kernel, rootfs, spec, wire
from posttrain.sandbox.cgroups import CgroupPlace, cgroup_places
from posttrain.sandbox.channel import attend
from posttrain.sandbox.disks import ARTEFACTS, BASE, DISK, UPPER
from posttrain.sandbox.holder import EMPTY, ETC, PROGRAM, Holder

_OWN_BYTES = 32 << 20


def leave_root(uid: int) -> None:
    """Become the user `uid` for good, without groups.

    Raises:
        OSError: the kernel refused. SandboxError: root could be taken back.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kernel.own_proc_entries()
    with contextlib.suppress(OSError):
        os.setresuid(0, 0, 0)
        raise SandboxError("root could be taken back after it was dropped.")


def enter_namespaces() -> None:
    """A user namespace of one user, a mount namespace whose /tmp is ours, and a process namespace
    for the children of this process.
    """
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
    for file, text in (
        ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"),
    ):  # fmt: skip
        with open(f"/proc/self/{file}", "w") as out:
            out.write(text)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", BASE, "tmpfs", flags, f"size={_OWN_BYTES},mode=755")


def furnish() -> None:
    """Write the sandbox's /etc into the holder's own tmpfs."""
    for folder in (DISK, UPPER, ARTEFACTS, ETC, EMPTY):
        os.mkdir(folder)
    os.mkdir(f"{EMPTY}/folder")
    with open(f"{EMPTY}/file", "w"):
        pass
    rootfs.furnish_etc(ETC, spec.INSIDE_ID)


def install(candidates: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, str]]:
    """Write the first bubblewrap (`bubblewrap.candidates`, with the content of their files) that is
    new enough into the holder's own tmpfs, asking it for its version as the unprivileged user;
    returns the program and what `doctor` shows of it.

    Raises:
        SandboxError: there is none.
    """
    seen = []
    for candidate in candidates:
        folder, start = Path(PROGRAM, candidate["source"]), candidate["start"]
        for path, data in candidate["files"].items():
            os.makedirs((folder / path).parent, exist_ok=True)
            (folder / path).write_bytes(data)
            (folder / path).chmod(0o755)
        program = str(folder / start)
        version = _version(program)
        if version >= spec.OLDEST_BUBBLEWRAP:
            return program, {
                "path": candidate["path"], "source": candidate["source"],
                "sha256": hashlib.sha256(candidate["files"][start]).hexdigest(),
                "version": ".".join(str(number) for number in version),
            }  # fmt: skip
        seen.append(f"{candidate['path']} is {'.'.join(map(str, version)) or 'not runnable'}")
    oldest = ".".join(str(number) for number in spec.OLDEST_BUBBLEWRAP)
    raise SandboxError(f"wanted bubblewrap {oldest} or newer, found {'; '.join(seen) or 'none'}")


def _version(program: str) -> tuple[int, ...]:
    try:
        ran = subprocess.run(
            [program, "--version"], env={}, capture_output=True, timeout=20, check=True
        )
        return tuple(int(number) for number in ran.stdout.decode().split()[-1].split("."))
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def porter(connection: socket.socket, order: Mapping[str, Any], group: CgroupPlace | None) -> None:
    """The porter's whole life."""
    candidates = [  # read while they can be
        {**entry, "files": {path: Path(own).read_bytes() for path, own in entry["files"].items()}}
        for entry in order["candidates"]
    ]
    stage = "root"
    try:
        if os.getuid() == 0:
            leave_root(order["uid"])
        kernel.no_new_privileges()
        kernel.signal_on_parent_death(signal.SIGKILL)
        stage = "namespaces"
        enter_namespaces()
        pid = os.fork()
    except (OSError, SandboxError) as error:
        connection.sendall(wire.encode({"id": 0, "stage": stage, "error": str(error)}))
        return
    if pid == 0:
        hold(connection, candidates, group, share=order["share"])
    else:
        connection.close()
        os.waitpid(pid, 0)


def hold(
    connection: socket.socket,
    candidates: Sequence[Mapping[str, Any]],
    group: CgroupPlace | None,
    *,
    share: bool,
) -> None:
    """The holder's whole life."""
    stage = "namespaces"
    try:
        kernel.signal_on_parent_death(signal.SIGKILL)
        # Ended children need no collecting; the sandboxes' first processes inherit this.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        kernel.mount("proc", "/proc", "proc", flags)
        furnish()
        stage = "bubblewrap"
        program, binary = install(candidates)
    except (OSError, SandboxError) as error:
        connection.sendall(wire.encode({"id": 0, "stage": stage, "error": str(error)}))
        return
    holder = Holder(program=program, binary=binary, group=group, share=share)
    connection.sendall(wire.encode({"id": 0, **holder.abilities}))
    asyncio.run(attend(connection, holder.serve))


def _end(pid: int) -> None:
    """Kill the porter; it may have ended already, and the groups still have to go."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """The keeper: make control groups, start the porter, remove the groups after its end."""
    parent = os.getppid()
    connection = wire.take_line()
    decoder = wire.Decoder()
    frames: list[wire.Frame] = []
    while not frames:
        data = connection.recv(1 << 16)
        if not data:
            return
        frames = list(decoder.feed(data))
    order = frames[0].head
    owner = order["uid"] if os.getuid() == 0 else os.getuid()
    with open("/proc/self/cgroup") as own, open("/proc/self/mountinfo") as mounts:
        places = cgroup_places(own.read(), mounts.read())
    group = cgroups.make(places, owner)
    kernel.adopt_orphans()
    pid = os.fork()
    if pid == 0:
        porter(connection, order, group)
        return
    connection.close()
    signal.signal(signal.SIGTERM, lambda *_: _end(pid))
    kernel.signal_on_parent_death(signal.SIGTERM)
    if os.getppid() != parent:
        _end(pid)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    if group is not None:
        cgroups.give_up(group, places[0])
