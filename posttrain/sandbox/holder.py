"""The process that mounts and starts: one unprivileged holder for all sandboxes of a driver.

It lives in a user and a mount namespace of its own (`keeper` puts it there), where /tmp is a
private tmpfs that holds every disk: nothing it mounts is seen by the host, and all of it is gone
with the holder. Not a resident: it never runs inside a sandbox, and what runs there cannot reach
it. The one thing that must stay true: a lease that is let go leaves no process, mount or folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.errors import SandboxError
from posttrain.core.ports import ExecResult
from posttrain.sandbox import cgroups, kernel, seccomp, spec, wire, workspace
from posttrain.sandbox.command import Command, Run
from posttrain.sandbox.limits import CgroupPlace
from posttrain.sandbox.live import Live

BASE = "/tmp"
"""Covered in the holder's own mount namespace; nothing is ever written to the host's. Each lease
has a mount namespace in turn, where its disk is at the same place as everybody else's in theirs:
so a command's cost does not grow with the number of leases, and closing a descriptor frees all.
"""
DISK, ARTEFACTS, PROGRAM = f"{BASE}/disk", f"{BASE}/artefacts", f"{BASE}/program"
ETC, EMPTY = f"{BASE}/etc", f"{BASE}/empty"
_ENTERABLE = 0o755
"""Mode of the workspace at the start of every command: a policy that shut itself out of it must
not thereby keep the next command, the sealing or a checker from working.
"""
_MOUNTS = "/proc/self/ns/mnt"
_SEAL_FLAGS = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOSYMFOLLOW


@dataclass(slots=True, kw_only=True)
class Lease:
    """One disk and what runs over it."""

    name: str
    disk: spec.Disk
    group: CgroupPlace | None
    beside: bool
    """Whether a sealed workspace is mounted at `ARTEFACTS`."""
    mounts: int
    """Descriptor of its mount namespace."""
    workspace: int
    """Descriptor of the folder that commands see as their workspace."""
    live: Live | None = None
    """Its namespaces, started with its first command; files outlive them."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    runs: dict[int, Run] = field(default_factory=dict)
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Holder:
    """Serves the driver's requests; one method a request."""

    def __init__(
        self, *, program: str, binary: Mapping[str, str], group: CgroupPlace | None
    ) -> None:
        self._program = program
        self._binary = binary
        self._group = group
        self._system = system_folders()
        self._seccomp = seccomp.program(platform.machine())
        self._leases: dict[str, Lease] = {}
        self._own_mounts = os.open(_MOUNTS, os.O_RDONLY)

    @property
    def abilities(self) -> dict[str, Any]:
        """What this machine gave."""
        version = self._group.version if self._group else 0
        filtered = self._seccomp is not None
        return {
            "uid": os.getuid(), "cgroups": version, "seccomp": filtered, "binary": self._binary
        }  # fmt: skip

    async def serve(self, head: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Answer one request."""
        match head["op"]:
            case "lease":
                self._open(head)
            case "exec":
                return _result(await self._exec(head, body)), b""
            case "kill":
                self._kill(head["lease"], head["run"])
            case "read":
                return self._read(head)
            case "entries":
                root = self._lease(head["lease"]).workspace
                found = workspace.entries(root, max_entries=head["max_entries"])
                return {"entries": found}, b""
            case "write":
                workspace.write(self._lease(head["lease"]).workspace, head["parts"], body)
            case "seal":
                await self._seal(self._lease(head["lease"]))
            case "close":
                await self._close(head["lease"])
            case "stats":
                runs = sum(len(lease.runs) for lease in self._leases.values())
                return {"leases": len(self._leases), "runs": runs}, b""
            case unknown:
                raise SandboxError(f"the holder knows no operation {unknown!r}.")
        return {}, b""

    def _lease(self, name: str) -> Lease:
        if name not in self._leases:
            raise SandboxError(f"sandbox {name} is closed.")
        return self._leases[name]

    @contextlib.contextmanager
    def _within(self, mounts: int | None) -> Iterator[None]:
        """Go to a mount namespace (None: a new one) and come back."""
        if mounts is None:
            kernel.unshare(kernel.CLONE_NEWNS)
        else:
            kernel.enter_mounts(mounts)
        try:
            yield
        finally:
            kernel.enter_mounts(self._own_mounts)

    def _open(self, head: Mapping[str, Any]) -> None:
        """Make a lease: its disk, its group, its files, and what is mounted beside."""
        name, disk = head["lease"], spec.Disk(**head["disk"])
        beside = self._lease(head["beside"]) if head["beside"] else None
        try:
            mounts, folder = self._mount(disk, beside)
            group = self._group.below(name) if self._group else None
            lease = Lease(
                name=name, disk=disk, group=group, beside=beside is not None,
                mounts=mounts, workspace=folder,
            )  # fmt: skip
        except OSError as error:
            raise SandboxError(f"a disk could not be mounted: {error}") from error
        self._leases[name] = lease
        try:
            if self._group is not None:
                limits = {key: head[key] for key in ("memory_bytes", "max_processes")}
                cgroups.make_lease(self._group, name, **limits)
            for path, text in head["files"].items():
                workspace.write(folder, path.split("/"), text.encode("utf-8", "replace"))
        except OSError as error:
            self._let_go(lease)
            raise SandboxError(f"a sandbox could not be laid out: {error}") from error

    def _mount(self, disk: spec.Disk, beside: Lease | None) -> tuple[int, int]:
        """Descriptors of a new mount namespace and of the workspace in it."""
        clone = None
        if beside is not None:
            with self._within(beside.mounts):
                clone = kernel.clone_mount(f"{DISK}/work")
        try:
            with self._within(None):
                flags = kernel.MS_NOSUID | kernel.MS_NODEV
                kernel.mount("tmpfs", DISK, "tmpfs", flags, disk.mount_options)
                for part in spec.WRITABLE:
                    os.mkdir(f"{DISK}/{part}")
                if clone is not None:
                    kernel.attach_mount(clone, ARTEFACTS)
                    flags = kernel.MS_BIND | kernel.MS_REMOUNT | _SEAL_FLAGS
                    kernel.mount("", ARTEFACTS, "", flags)
                folder = os.open(f"{DISK}/work", os.O_RDONLY | os.O_DIRECTORY)
                return os.open(_MOUNTS, os.O_RDONLY), folder
        finally:
            if clone is not None:
                os.close(clone)

    async def _exec(self, head: Mapping[str, Any], stdin: bytes) -> ExecResult:
        command = Command(
            argv=tuple(word.encode("utf-8", "surrogatepass") for word in head["argv"]),
            stdin=stdin, timeout_s=head["timeout_s"], cap_bytes=head["cap_bytes"],
            limits=head["limits"],
        )  # fmt: skip
        return await self._run(self._lease(head["lease"]), head["id"], command)

    async def _run(self, lease: Lease, number: int, command: Command) -> ExecResult:
        run = Run(command)
        lease.runs[number] = run
        lease.idle.clear()
        try:
            live = await self._live(lease)
            os.fchmod(lease.workspace, _ENTERABLE)
            return await run.run(live)
        finally:
            del lease.runs[number]
            if not lease.runs:
                lease.idle.set()

    async def _live(self, lease: Lease) -> Live:
        """The lease's namespaces; new ones where there are none or what ran in them ended them."""
        async with lease.starting:
            if lease.live is None or not lease.live.alive:
                await self._end_live(lease)
                layout = spec.Layout(
                    disk=DISK, etc=ETC, empty=EMPTY, system=self._system,
                    artefacts=ARTEFACTS if lease.beside else None,
                )  # fmt: skip
                live = await Live.start(
                    bubblewrap=self._program, options=spec.bubblewrap_arguments(layout),
                    seccomp=self._seccomp, within=lambda: self._within(lease.mounts),
                )  # fmt: skip
                groups = lease.group.entrances if lease.group else ()
                await live.admit(groups=groups, seccomp=self._seccomp)
                lease.live = live
            return lease.live

    async def _end_live(self, lease: Lease) -> None:
        live, lease.live = lease.live, None
        if live is not None:
            await live.end()

    def _kill(self, name: str, number: int) -> None:
        lease = self._leases.get(name)
        if lease is not None and number in lease.runs:
            lease.runs[number].kill()

    async def _end_runs(self, lease: Lease) -> None:
        for run in lease.runs.values():
            run.kill()
        if lease.runs:
            await lease.idle.wait()
        async with lease.starting:
            await self._end_live(lease)

    def _read(self, head: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        root = self._lease(head["lease"]).workspace
        data = workspace.read(root, head["parts"], max_bytes=head["max_bytes"])
        return {"found": data is not None}, data or b""

    async def _seal(self, lease: Lease) -> None:
        await self._end_runs(lease)
        os.fchmod(lease.workspace, _ENTERABLE)
        workspace.sweep(lease.workspace)
        flags = kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
        try:
            with self._within(lease.mounts):
                kernel.mount("", DISK, "", flags, lease.disk.mount_options)
        except OSError as error:
            raise SandboxError(f"a workspace could not be made read-only: {error}") from error

    async def _close(self, name: str) -> None:
        lease = self._leases.get(name)
        if lease is not None:
            await self._end_runs(lease)
            self._let_go(lease)

    def _let_go(self, lease: Lease) -> None:
        """With its last descriptor the namespace goes, and with that its mounts."""
        self._leases.pop(lease.name, None)
        os.close(lease.workspace)
        os.close(lease.mounts)
        if lease.group is not None:
            cgroups.remove(lease.group)


def _result(result: ExecResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in ExecResult.__slots__}


def system_folders() -> dict[str, str]:
    """Host's /usr and the top-level folders that lead to it: link target, or '' for a folder."""
    found = {"/usr": ""}
    for folder in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(folder):
            found[folder] = os.readlink(folder)
        elif os.path.isdir(folder):
            found[folder] = ""
    return found


async def attend(connection: socket.socket, holder: Holder) -> None:
    """Serve until the driver closes its end, or its process is gone and with it that end."""
    reader, writer = await asyncio.open_connection(sock=connection)
    decoder, tasks = wire.Decoder(), set()

    async def answer(frame: wire.Frame) -> None:
        number = frame.head["id"]
        try:
            head, body = await holder.serve(frame.head, frame.body)
            data = wire.encode({**head, "id": number}, body)
        except OSError as error:
            data = wire.encode({"id": number, "errno": error.errno, "error": str(error)})
        except SandboxError as error:
            told = {"error": error.message, "next_step": error.next_step}
            data = wire.encode({"id": number, **told})
        except Exception as error:  # The boundary of this process: every request is answered.
            told = {"error": f"{type(error).__name__}: {error}", "next_step": ""}
            data = wire.encode({"id": number, **told})
        writer.write(data)

    while received := await reader.read(1 << 18):
        for frame in decoder.feed(received):
            task = asyncio.ensure_future(answer(frame))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
