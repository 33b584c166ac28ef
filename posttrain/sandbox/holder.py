"""The process that mounts and starts: one unprivileged holder for all sandboxes of a driver.

It lives in a user and a mount namespace of its own (`keeper` puts it there), where /tmp is a
private tmpfs that holds every disk: nothing it mounts is seen by the host, and all of it is gone
with the holder. Not a resident: it never runs inside a sandbox, and what runs there cannot reach
it. The one thing that must stay true: a lease that is let go leaves no process, mount or folder.
"""

from __future__ import annotations

import asyncio
import errno
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.core.containment import ExecResult
from posttrain.core.errors import SandboxError
from posttrain.sandbox import cgroups, rootfs, seccomp, spec, workspace
from posttrain.sandbox.cgroups import CgroupPlace
from posttrain.sandbox.channel import Reply
from posttrain.sandbox.command import Begun, Run
from posttrain.sandbox.disks import ARTEFACTS, BASE, DISK, Disk, Disks
from posttrain.sandbox.live import Live
from posttrain.sandbox.usher import Command, Ushers

PROGRAM, ETC, EMPTY = f"{BASE}/program", f"{BASE}/etc", f"{BASE}/empty"


@dataclass(slots=True, kw_only=True)
class Lease:
    """One disk and what runs over it."""

    name: str
    disk: Disk
    group: CgroupPlace | None
    guards: spec.Guards = field(default_factory=spec.Guards)
    door: bool = False
    """Whether its namespaces have a socket that a proxy can be served on."""
    live: Live | None = None
    """Its namespaces, started with its first command; files outlive them."""
    memory_lost: bool = False
    """Whether processes of commands have ended, which no command's result has told yet."""
    begun: Begun | None = None
    """A command that waits in the namespaces for its input."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    runs: dict[int, Run] = field(default_factory=dict)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    thawed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.thawed.set()

    def put(self, begun: Begun | None) -> None:
        """Let a command wait; one that waited is let go."""
        before, self.begun = self.begun, begun
        if before is not None:
            before.close()

    def take(self, command: Command) -> Begun | None:
        """The command that waits, if it is this one; another one is let go."""
        begun, self.begun = self.begun, None
        if begun is None or begun.is_of(command):
            return begun
        begun.close()
        return None

    async def freeze(self) -> None:
        """Bring what runs to a stand. Time stands still only then: what cannot be stopped must not
        have more of it.
        """
        self.thawed.clear()
        async with self.starting:
            still = self.live is None or await self.live.stop()
        for run in self.runs.values() if still and not self.thawed.is_set() else ():
            run.freeze()

    def thaw(self) -> None:
        """Let it go on."""
        if self.live is not None:
            self.live.go_on()
        for run in self.runs.values():
            run.thaw()
        self.thawed.set()


class Holder:
    """Serves the driver's requests; one method a request."""

    def __init__(
        self, *, program: str, binary: Mapping[str, str], group: CgroupPlace | None, share: bool
    ) -> None:
        self._program = program
        self._binary = binary
        self._group = group
        self._system = rootfs.system_folders()
        self._seccomp = seccomp.program(platform.machine())
        self._ushers = Ushers(self._seccomp)
        self._leases: dict[str, Lease] = {}
        self._disks = Disks(share=share)

    @property
    def abilities(self) -> dict[str, Any]:
        """What this machine gave."""
        version = self._group.version if self._group else 0
        filtered = self._seccomp is not None
        cores = self._group is not None and self._group.cpu is not None
        return {
            "uid": os.getuid(), "cgroups": version, "seccomp": filtered, "binary": self._binary,
            "shares": self._disks.shares, "cores": cores,
        }  # fmt: skip

    async def serve(
        self, head: Mapping[str, Any], body: bytes, reply: Reply
    ) -> tuple[dict[str, Any], bytes]:
        """Answer one request."""
        match head["op"]:
            case "lease":
                self._open(head, body)
            case "exec":
                listen = reply.part if head["listen"] else None
                return _result(await self._exec(head, body, listen)), b""
            case "begin":
                await self._begin(head)
            case "kill":
                self._kill(head["lease"], head["run"])
            case "seal":
                await self._seal(self._lease(head["lease"]))
            case "snapshot":
                await self._snapshot(self._lease(head["lease"]), head["name"])
            case "door":
                return await self._door(self._lease(head["lease"]), head["known"], reply), b""
            case "freeze":
                await self._lease(head["lease"]).freeze()
            case "thaw":
                self._lease(head["lease"]).thaw()
            case "end":
                await self._end_runs(self._lease(head["lease"]))
            case "usage":
                return self._usage(self._lease(head["lease"])), b""
            case "close":
                await self._close(head["lease"])
            case "stats":
                runs = sum(len(lease.runs) for lease in self._leases.values())
                return {"leases": len(self._leases), "runs": runs}, b""
            case _:
                return workspace.serve(self._lease(head["lease"]).disk.workspace, head, body)
        return {}, b""

    def _lease(self, name: str) -> Lease:
        if name not in self._leases:
            raise SandboxError(f"sandbox {name} is closed.")
        return self._leases[name]

    def _open(self, head: Mapping[str, Any], body: bytes) -> None:
        """Make a lease: its disk, its group, its files, and what is mounted beside."""
        name = head["lease"]
        over = self._lease(head["over"]).disk if head["over"] else None
        beside = self._lease(head["beside"]).disk.files if head["beside"] else None
        try:
            disk = self._disks.make(spec.Disk(**head["disk"]), over=over, beside=beside)
        except OSError as error:
            raise SandboxError(f"a disk could not be mounted: {error}") from error
        group = self._group.below(name) if self._group else None
        guards = spec.Guards(**head["guards"])
        lease = Lease(
            name=name, disk=disk, group=group, guards=guards, door=head["door"],
            memory_lost=not head["strict"],
        )  # fmt: skip
        self._leases[name] = lease
        try:
            if self._group is not None:
                limits = {key: head[key] for key in ("memory_bytes", "max_processes", "cores")}
                cgroups.make_lease(self._group, name, **limits)
            begin = 0
            for path, size in head["files"]:
                workspace.write(disk.workspace, path.split("/"), body[begin : begin + size])
                begin += size
            self._guard(lease, strict=head["strict"])
        except OSError as error:
            self._let_go(lease)
            raise SandboxError(f"a sandbox could not be laid out: {error}") from error

    def _guard(self, lease: Lease, *, strict: bool) -> None:
        """Put the lease's guards up. What a policy has taken away since needs none; before it had
        its hands on it, everything named is there (`strict`).
        """
        uncovered, covered = lease.guards.read_only, lease.guards.hidden
        for path, cover in (*((p, None) for p in uncovered), *((p, EMPTY) for p in covered)):
            try:
                self._disks.guard(lease.disk, path, cover=cover)
            except OSError as error:
                if strict or error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise OSError(error.errno, f"{'/'.join(path)}: {error.strerror}") from error

    async def _exec(
        self, head: Mapping[str, Any], stdin: bytes, listen: Callable[[str, bytes], None] | None
    ) -> ExecResult:
        lease, command = self._lease(head["lease"]), _command(head, stdin)
        run = Run(command, listen=listen)
        lease.runs[head["run"]] = run
        lease.idle.clear()
        try:
            await lease.thawed.wait()
            live = await self._live(lease)
            await lease.thawed.wait()
            lost, lease.memory_lost = lease.memory_lost, False
            deaths = lease.group.oom_kills() if lease.group else 0
            result = await run.run(live, lease.take(command))
            return replace(
                result,
                out_of_memory=lease.group is not None and lease.group.oom_kills() > deaths,
                disk_full=workspace.use(lease.disk.workspace)[1],
                memory_lost=lost,
            )
        finally:
            del lease.runs[head["run"]]
            if not lease.runs:
                lease.idle.set()

    async def _begin(self, head: Mapping[str, Any]) -> None:
        """Start a command that an `exec` of the same words is to give its input to."""
        lease = self._lease(head["lease"])
        live = await self._live(lease)
        lease.put(Begun(live, _command(head, b"")))

    async def _door(self, lease: Lease, known: int, reply: Reply) -> dict[str, Any]:
        """The listening socket of the namespaces there are now, where it is not `known` yet."""
        live = await self._live(lease)
        if live.door is not None and live.number != known:
            reply.files.append(os.dup(live.door))
        return {"number": live.number, "files": len(reply.files)}

    def _usage(self, lease: Lease) -> dict[str, Any]:
        memory, processes = None, None
        if lease.group is not None:
            memory, processes = lease.group.usage()
        return {
            "memory_bytes": memory,
            "processes": None if processes is None else max(0, processes - 1),
            "disk_bytes": workspace.use(lease.disk.workspace)[0],
        }

    async def _live(self, lease: Lease) -> Live:
        """The lease's namespaces; new ones where there are none or what ran in them ended them."""
        workspace.open_up(lease.disk.workspace)
        async with lease.starting:
            if lease.live is None or not lease.live.alive:
                await self._end_live(lease)
                options = spec.bubblewrap_arguments(
                    disk=DISK, etc=ETC, empty=f"{EMPTY}/folder", system=self._system,
                    hidden=_hidden(lease.guards.system),
                    artefacts=ARTEFACTS if lease.disk.artefacts else None,
                )  # fmt: skip
                live = await Live.start(
                    bubblewrap=self._program, options=options,
                    seccomp=self._seccomp, within=lambda: self._disks.within(lease.disk.mounts),
                )  # fmt: skip
                await live.admit(self._ushers, group=lease.group, door=lease.door)
                lease.live = live
            return lease.live

    async def _end_live(self, lease: Lease) -> None:
        live, lease.live = lease.live, None
        lease.put(None)
        if live is not None:
            lease.memory_lost = True
            await live.end()

    def _kill(self, name: str, number: int) -> None:
        lease = self._leases.get(name)
        if lease is not None and number in lease.runs:
            lease.runs[number].kill()

    async def _end_runs(self, lease: Lease) -> None:
        for run in lease.runs.values():
            run.kill()
        lease.thawed.set()
        if lease.runs:
            await lease.idle.wait()
        async with lease.starting:
            await self._end_live(lease)

    async def _seal(self, lease: Lease) -> None:
        """End what runs and make the disk a layer; where that fails the lease is lost."""
        await self._end_runs(lease)
        workspace.open_up(lease.disk.workspace)
        workspace.sweep(lease.disk.workspace)
        try:
            lease.disk = self._disks.seal(lease.disk)
        except OSError as error:
            self._let_go(lease)
            raise SandboxError(f"a workspace could not be sealed: {error}") from error

    async def _snapshot(self, lease: Lease, name: str) -> None:
        """Seal what there is under a name of its own; the lease goes on over it, or is lost where
        the machine does not let it. One that is too deep for that goes on as it was.
        """
        self._disks.check_depth(len(lease.disk.layers) + 1)
        await self._seal(lease)
        sealed = lease.disk
        try:
            lease.disk = self._disks.make(sealed.size, over=sealed, beside=sealed.beside)
            self._guard(lease, strict=False)
        except OSError as error:
            if lease.disk is not sealed:
                sealed.close()
            self._let_go(lease)
            raise SandboxError(f"a sandbox could not go on over its seal: {error}") from error
        self._leases[name] = Lease(name=name, disk=sealed, group=None)

    async def _close(self, name: str) -> None:
        lease = self._leases.get(name)
        if lease is not None:
            try:
                await self._end_runs(lease)
            finally:
                self._let_go(lease)

    def _let_go(self, lease: Lease) -> None:
        self._leases.pop(lease.name, None)
        lease.disk.close()
        if lease.group is not None:
            cgroups.remove(lease.group)


def _command(head: Mapping[str, Any], stdin: bytes) -> Command:
    return Command(
        argv=tuple(word.encode("utf-8", "surrogatepass") for word in head["argv"]),
        stdin=stdin, timeout_s=head["timeout_s"], cap_bytes=head["cap_bytes"],
        limits=head["limits"], variables=head["variables"],
    )  # fmt: skip


def _result(result: ExecResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in ExecResult.__slots__}


def _hidden(paths: Sequence[str]) -> dict[str, str]:
    """System path → the empty thing to show instead; those that are not there need none."""
    return {
        path: f"{EMPTY}/folder" if os.path.isdir(path) else f"{EMPTY}/file"
        for path in paths
        if os.path.exists(path)
    }
