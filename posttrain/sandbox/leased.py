"""What the holder's driver hands out: a leased sandbox, and a sealed workspace.

Each is a name and a line to the holder. The one thing that must stay true: whatever happens inside,
a call ends in its result or in `SandboxError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.core.containment import ExecResult, Sealed, Usage
from posttrain.core.errors import SandboxError, UsageError
from posttrain.core.task import Entry, EntryKind, Environment
from posttrain.sandbox import egress, spec, wire
from posttrain.sandbox.channel import Answer, Channel
from posttrain.sandbox.egress import Exchange
from posttrain.sandbox.leases import Leases, LeaseState
from posttrain.sandbox.limits import process_limits
from posttrain.sandbox.proxy import Proxy

_GRACE_S = 60.0
"""A holder that answers this much later than a command's time limit is taken to be lost."""


class Held:
    """What a lease and its sealed form share: a name and a line to what holds its files."""

    def __init__(self, name: str, channel: Channel, leases: Leases) -> None:
        self.name = name
        self.channel = channel
        self._leases = leases

    async def _ask(self, operation: str, body: bytes = b"", **head: Any) -> wire.Frame:
        """An answer of the holder.

        Raises:
            SandboxError: the holder is gone or could not do it. OSError: a file operation failed.
        """
        order = {"op": operation, "lease": self.name, **head}
        return _answer(await self.channel.request(order, body))

    async def read(self, path: str, *, max_bytes: int) -> bytes | None:
        """As the port says; a path that leaves the workspace names no file."""
        try:
            parts = spec.workspace_parts(path)
        except UsageError:
            return None
        answer = await self._ask("read", parts=parts, max_bytes=max_bytes)
        return answer.body if answer.head["found"] else None

    async def _close(self) -> None:
        """Let the lease go; sent at once, so that a cancelled caller changes nothing."""
        if self._leases.state(self.name) is LeaseState.CLOSED:
            return
        self._leases.move(self.name, LeaseState.CLOSED)
        answer = self.channel.post({"op": "close", "lease": self.name})
        with contextlib.suppress(SandboxError):
            await asyncio.shield(asyncio.wrap_future(answer))


class SealedWorkspace(Held):
    """What an attempt left (`containment.Sealed`), read-only in the holder."""

    async def entries(self, *, max_entries: int) -> tuple[Entry, ...]:
        """As the port says."""
        answer = await self._ask("entries", max_entries=max_entries)
        return tuple(
            Entry(path=path, kind=EntryKind(kind), mode=mode, size=size)
            for path, kind, mode, size in answer.head["entries"]
        )

    async def close(self) -> None:
        """As the port says."""
        await self._close()


class BubblewrapSandbox(Held):
    """One lease (`containment.Sandbox`)."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        leases: Leases,
        environment: Environment,
        *,
        tell: Callable[[Exchange], None],
    ) -> None:
        super().__init__(name, channel, leases)
        self._environment = environment
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._tell = tell
        self._proxy: Proxy | None = None
        self._door = 0
        self._opening = asyncio.Lock()

    async def open(
        self,
        beside: Sealed | None,
        over: Sealed | None,
        *,
        guarded: bool = True,
        strict: bool = True,
    ) -> None:
        """Make the disk and lay the files, where it is not over one that has them; put up the
        environment's guards, all of which are there where no policy was yet (`strict`).
        """
        for sealed in (beside, over):
            if isinstance(sealed, SealedWorkspace) and sealed.channel.lost:
                raise SandboxError(f"sealed workspace {sealed.name} was lost with its holder.")
            if sealed is not None and not (
                isinstance(sealed, SealedWorkspace) and sealed.channel is self.channel
            ):
                raise UsageError(f"wanted a workspace sealed by this source, got {sealed!r}.")
        environment = self._environment
        laid = {} if over is not None else environment.files
        files = {"/".join(spec.workspace_parts(path)): text for path, text in laid.items()}
        disk = spec.Disk.of(environment)
        await self._ask(
            "lease",
            disk={"size_bytes": disk.size_bytes, "inodes": disk.inodes},
            files=files,
            memory_bytes=environment.memory_bytes,
            max_processes=environment.max_processes,
            cores=environment.cores,
            beside=beside.name if isinstance(beside, SealedWorkspace) else None,
            over=over.name if isinstance(over, SealedWorkspace) else None,
            guards=spec.guards(environment) if guarded else {},
            door=environment.network.reaches_out,
            strict=strict,
        )

    def _ensure_open(self, name: str | None = None) -> None:
        name = name or self.name
        state = self._leases.state(name)
        if state is not LeaseState.OPEN:
            raise SandboxError(f"sandbox {name} is not open but {state}.")

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        listen: Callable[[str, bytes], None] | None = None,
    ) -> ExecResult:
        """As the port says. The exit code of a command that a signal ended is 128 + its number;
        127 and 126 mean that it could not be found or started, as in a shell.

        Raises:
            UsageError: there is no command or no time. SandboxError: the sandbox was lost.
        """
        self._ensure_open()
        limit_s = self._environment.exec_timeout_s if timeout_s is None else timeout_s
        if not argv or limit_s <= 0:
            raise UsageError(f"wanted a command and a time, got {list(argv)!r} and {limit_s} s.")
        order = {
            "op": "exec",
            "lease": self.name,
            "argv": list(argv),
            "timeout_s": limit_s,
            "cap_bytes": self._environment.max_output_bytes,
            "limits": process_limits(self._environment),
            "listen": listen is not None,
            "variables": egress.VARIABLES if self._environment.network.reaches_out else {},
        }
        if self._environment.network.reaches_out:
            await self._serve_door()
        number, answer = self.channel.begin()
        if listen is not None:
            self.channel.listen(number, listen)
        try:
            await self.channel.send(number, order, stdin)
            frame = await self._answered(answer, limit_s + _GRACE_S)
        except asyncio.CancelledError:
            self.channel.post({"op": "kill", "lease": self.name, "run": number})
            raise
        return ExecResult(**{name: _answer(frame).head[name] for name in ExecResult.__slots__})

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

    async def write(self, path: str, data: bytes) -> None:
        """As the port says.

        Raises:
            UsageError: the path leaves the workspace. OSError: the disk is full or something is in
                the way: the policy's doing. SandboxError: the sandbox was lost.
        """
        self._ensure_open()
        await self._ask("write", data, parts=spec.workspace_parts(path))

    async def seal(self) -> SealedWorkspace:
        """As the port says; pipes and sockets are removed, since opening one could hang a reader.

        Raises:
            SandboxError: the sandbox was lost or is closed.
        """
        self._ensure_open()
        await self._ask("seal")
        self._ensure_open()
        self._leases.move(self.name, LeaseState.SEALED)
        return SealedWorkspace(self.name, self.channel, self._leases)

    async def snapshot(self) -> SealedWorkspace:
        """As the port says.

        Raises:
            SandboxError: the sandbox was lost or is closed.
        """
        self._ensure_open()
        name = self._leases.add()
        answer = self.channel.post({"op": "snapshot", "lease": self.name, "name": name})
        try:
            _answer(await asyncio.shield(asyncio.wrap_future(answer)))
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


def _answer(frame: wire.Frame) -> wire.Frame:
    """The answer, or what went wrong."""
    if "errno" in frame.head:
        raise OSError(frame.head["errno"], frame.head["error"])
    if "error" in frame.head:
        raise SandboxError(frame.head["error"], frame.head["next_step"])
    return frame
