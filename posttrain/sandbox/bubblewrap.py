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
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import posttrain
from posttrain.core.errors import IsolationError, PosttrainError, SandboxError, UsageError
from posttrain.core.ports import ExecResult, Sandbox, Sealed
from posttrain.core.task import Entry, EntryKind, Environment, Isolation
from posttrain.sandbox import child, machine, spec, wire
from posttrain.sandbox.channel import Channel
from posttrain.sandbox.leases import Leases, LeaseState, LeaseStats
from posttrain.sandbox.limits import process_limits
from posttrain.sandbox.machine import ADVICE, Abilities, abilities_of

_GRACE_S = 60.0
"""A holder that answers this much later than a command's time limit is taken to be lost."""


class BubblewrapSandboxes:
    """A source of sandboxes (`core.ports.Sandboxes`). Close it, or use it as a context manager."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._leases = Leases()

    @property
    def isolation(self) -> Isolation:
        """Namespaces over a shared kernel."""
        return Isolation.NAMESPACE

    def lease(
        self, environment: Environment, *, beside: Sealed | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """As the port says; links inside `/artefacts` are not followed by anybody.

        Raises:
            IsolationError: a higher level is required, or this machine cannot contain anything.
            UsageError: a file of the environment lies outside the workspace, or `beside` is of
                another source. SandboxError: it could not be made, or its set-up failed.
        """
        if environment.isolation.rank > self.isolation.rank:
            raise IsolationError(
                f"the task requires isolation '{environment.isolation}', bubblewrap gives "
                f"'{self.isolation}'.",
                next_step="run 'posttrain doctor' to see which drivers work here.",
            )
        return self._lease(environment, beside)

    @contextlib.asynccontextmanager
    async def _lease(
        self, environment: Environment, beside: Sealed | None
    ) -> AsyncIterator[Sandbox]:
        channel = await self._connect()
        name = self._leases.add()
        sandbox = BubblewrapSandbox(name, channel, self._leases, environment)
        try:
            await sandbox.open(beside)
            yield sandbox
        finally:
            await sandbox.close()

    async def abilities(self) -> Abilities:
        """What sandboxes here can do.

        Raises:
            IsolationError: this machine cannot contain anything.
        """
        channel = await self._connect()
        return abilities_of((await _greeting(channel)).head)

    async def _connect(self) -> Channel:
        """The channel of a holder that greeted; a lost one is replaced, and its leases are lost."""
        if self._channel is not None and self._channel.lost:
            self._leases.lose()
            self._channel = None
        if self._channel is None:
            self._channel = _start()
        channel = self._channel
        greeting = (await _greeting(channel)).head
        if "error" in greeting:
            channel.close()
            what, next_step = ADVICE[greeting["stage"]]
            raise IsolationError(f"{what} ({greeting['error']}).", next_step=next_step)
        return channel

    def stats(self) -> LeaseStats:
        """Numbers of leases."""
        return self._leases.stats()

    def check(self) -> None:
        """Invariants."""
        self._leases.check()

    async def close(self) -> None:
        """End every sandbox and the holder; idempotent. The source may be used again afterwards."""
        channel, self._channel = self._channel, None
        if channel is not None:
            self._leases.lose()
            channel.close()
            await asyncio.shield(channel.closed())

    async def __aenter__(self) -> BubblewrapSandboxes:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class _Held:
    """What a lease and its sealed form share: a name and a line to the holder."""

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


class SealedWorkspace(_Held):
    """What an attempt left (`core.ports.Sealed`), read-only in the holder."""

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


class BubblewrapSandbox(_Held):
    """One lease (`core.ports.Sandbox`)."""

    def __init__(
        self, name: str, channel: Channel, leases: Leases, environment: Environment
    ) -> None:
        super().__init__(name, channel, leases)
        self._environment = environment

    async def open(self, beside: Sealed | None) -> None:
        """Lay the files and run the set-up."""
        if beside is not None and not (
            isinstance(beside, SealedWorkspace) and beside.channel is self.channel
        ):
            raise UsageError(f"wanted a workspace sealed by this source, got {beside!r}.")
        environment = self._environment
        files = {
            "/".join(spec.workspace_parts(path)): text for path, text in environment.files.items()
        }
        disk = spec.Disk.of(environment)
        await self._ask(
            "lease",
            disk={"size_bytes": disk.size_bytes, "inodes": disk.inodes},
            files=files,
            memory_bytes=environment.memory_bytes,
            max_processes=environment.max_processes,
            beside=beside.name if isinstance(beside, SealedWorkspace) else None,
        )
        for command in environment.setup:
            result = await self.exec(("/bin/sh", "-c", command))
            if result.exit_code != 0:
                what = "ran out of time" if result.timed_out else f"gave {result.exit_code}"
                raise SandboxError(f"set-up {command!r} {what}: {result.stderr[-500:]}")

    def _ensure_open(self) -> None:
        state = self._leases.state(self.name)
        if state is not LeaseState.OPEN:
            raise SandboxError(f"sandbox {self.name} is not open but {state}.")

    async def exec(
        self, argv: Sequence[str], *, timeout_s: float | None = None, stdin: bytes = b""
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
            "limits": process_limits(self._environment, timeout_s=limit_s),
        }
        number, answer = self.channel.begin()
        try:
            await self.channel.send(number, order, stdin)
            async with asyncio.timeout(limit_s + _GRACE_S):
                frame = await asyncio.wrap_future(answer)
        except TimeoutError as error:
            self.channel.close()
            raise SandboxError("the holder of the sandboxes no longer answers.") from error
        except asyncio.CancelledError:
            self.channel.post({"op": "kill", "lease": self.name, "run": number})
            raise
        return ExecResult(**{name: _answer(frame).head[name] for name in ExecResult.__slots__})

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
        self._leases.move(self.name, LeaseState.SEALED)
        return SealedWorkspace(self.name, self.channel, self._leases)

    async def close(self) -> None:
        """As the port says; what was sealed belongs to its `Sealed`."""
        if self._leases.state(self.name) is not LeaseState.SEALED:
            await self._close()


def _answer(frame: wire.Frame) -> wire.Frame:
    """The answer, or what went wrong."""
    if "errno" in frame.head:
        raise OSError(frame.head["errno"], frame.head["error"])
    if "error" in frame.head:
        raise SandboxError(frame.head["error"], frame.head["next_step"])
    return frame


# --- starting and describing ------------------------------------------------------------------


def _start() -> Channel:
    """A channel to a holder that has been told what it needs."""
    start = functools.partial(
        child.spawn,
        "posttrain.sandbox.keeper",
        options=("-I", "-S"),
        search=(str(Path(posttrain.__file__).parents[1]),),
        variables={},
    )
    channel = Channel(start, name="the holder of the sandboxes")
    channel.post({"candidates": machine.candidates(), "uid": spec.UNPRIVILEGED_ID})
    return channel


async def _greeting(channel: Channel) -> wire.Frame:
    """What the holder said first; every waiter may be cancelled without harm to the others."""
    return await asyncio.shield(asyncio.wrap_future(channel.greeting))


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What `doctor` shows of the sandboxes of this machine."""

    abilities: Abilities | None
    """None: nothing can be contained here."""
    problem: str | None = None
    """One paragraph: what, why, next command."""


async def probe() -> Probe:
    """Try it out: start a holder, lease a sandbox, run a command in it."""
    async with BubblewrapSandboxes() as sandboxes:
        try:
            abilities = await sandboxes.abilities()
            async with sandboxes.lease(Environment()) as sandbox:
                result = await sandbox.exec(("/bin/sh", "-c", "id -u"))
        except PosttrainError as error:
            return Probe(abilities=None, problem=str(error))
    if result.stdout.strip() != str(spec.INSIDE_ID):
        return Probe(abilities=None, problem=f"a command in a sandbox gave {result!r}.")
    return Probe(abilities=abilities)
