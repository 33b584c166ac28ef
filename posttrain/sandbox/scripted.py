"""Sandboxes without processes, for tests of the parts that use them.

A dictionary of files and a script: what each command does is written by the test. The one thing
that must stay true: it keeps the contract of `core.containment` (closed sandboxes fail, what was
sealed stays readable, everything let go is counted), so that no test passes here by luck.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from posttrain.core.containment import (
    Bound,
    Capabilities,
    ExecResult,
    Reach,
    Sandbox,
    Sealed,
    Snapshots,
    Usage,
)
from posttrain.core.errors import SandboxError, UsageError
from posttrain.core.task import Entry, EntryKind, Environment, Isolation
from posttrain.sandbox.leases import Leases, LeaseState, LeaseStats
from posttrain.sandbox.spec import workspace_parts

_NOT_FOUND = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """One command a scripted sandbox was given, with the files it may read and change."""

    argv: tuple[str, ...]
    stdin: bytes
    timeout_s: float
    files: dict[str, bytes]
    """The workspace, by relative path; changes are kept."""
    artefacts: Mapping[str, bytes]
    """What is mounted at `/artefacts`; empty where nothing is."""

    @property
    def line(self) -> str:
        """The command as one shell line; of `sh -c LINE` and `bash -c LINE` just the line."""
        if len(self.argv) == 3 and self.argv[0].endswith("sh") and self.argv[1].startswith("-"):
            return self.argv[2]
        return shlex.join(self.argv)


Script = Callable[[Executed], ExecResult]


def answers(results: Mapping[str, ExecResult | SandboxError]) -> Script:
    """A script that answers known lines; an unknown one is "not found", as in a shell.

    >>> script = answers({"echo hi": ExecResult(exit_code=0, stdout="hi", stderr="")})
    >>> done = dict(stdin=b"", timeout_s=1.0, files={}, artefacts={})
    >>> script(Executed(argv=("sh", "-c", "echo hi"), **done)).stdout
    'hi'
    """

    def script(command: Executed) -> ExecResult:
        result = results.get(command.line)
        if isinstance(result, SandboxError):
            raise result
        if result is None:
            text = f"{command.argv[0]}: not found in the script\n"
            return ExecResult(exit_code=_NOT_FOUND, stdout="", stderr=text)
        return result

    return script


class ScriptedSandboxes:
    """A source of scripted sandboxes (`containment.Sandboxes`).

    `failures` are raised by the first leases, one each; `executed` is every command so far.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        failures: Sequence[SandboxError] = (),
        isolation: Isolation = Isolation.NAMESPACE,
    ) -> None:
        self.executed: list[Executed] = []
        self.script = script or answers({})
        self._failures = list(failures)
        self._isolation = isolation
        self._leases = Leases()

    async def capabilities(self) -> Capabilities:
        """A level as the test wants it."""
        return Capabilities(
            isolation=self._isolation,
            limits=Bound.NOTHING,
            snapshots=Snapshots.COPIES,
            reach=frozenset({Reach.NOTHING}),
            cores=False,
            freezes=True,
        )

    def lease(
        self,
        environment: Environment,
        *,
        beside: Sealed | None = None,
        over: Sealed | None = None,
        ahead: Sequence[str] = (),
    ) -> AbstractAsyncContextManager[Sandbox]:
        """As the port says; nothing is started ahead."""
        return self._lease(environment, beside, over)

    @contextlib.asynccontextmanager
    async def _lease(
        self, environment: Environment, beside: Sealed | None, over: Sealed | None
    ) -> AsyncIterator[Sandbox]:
        (await self.capabilities()).ensure(environment, driver="the script")
        if self._failures:
            raise self._failures.pop(0)
        artefacts = self._files_of(beside)
        sandbox = ScriptedSandbox(self, self._leases, environment, artefacts)
        try:
            if over is not None:
                sandbox.files, sandbox.memory_lost = self._files_of(over), True
            for command in environment.setup if over is None else ():
                if (await sandbox.exec(("/bin/sh", "-c", command))).exit_code != 0:
                    raise SandboxError(f"set-up {command!r} failed.")
            yield sandbox
        finally:
            await sandbox.close()

    def _files_of(self, sealed: Sealed | None) -> dict[str, bytes]:
        if sealed is None:
            return {}
        if not isinstance(sealed, ScriptedSealed) or sealed.leases is not self._leases:
            raise UsageError(f"wanted a workspace sealed by this source, got {sealed!r}.")
        return dict(sealed.files)

    def stats(self) -> LeaseStats:
        """Numbers of leases."""
        return self._leases.stats()

    def check(self) -> None:
        """Invariants."""
        self._leases.check()

    async def close(self) -> None:
        """Nothing to end."""


class _Held:
    """What a scripted lease and its sealed form share."""

    def __init__(self, name: str, leases: Leases, files: dict[str, bytes]) -> None:
        self.name = name
        self.files = files
        self.leases = leases

    async def read(self, path: str, *, max_bytes: int) -> bytes | None:
        """As the port says."""
        if self.leases.state(self.name) is LeaseState.CLOSED:
            raise SandboxError(f"sandbox {self.name} is closed.")
        try:
            data = self.files.get("/".join(workspace_parts(path)))
        except UsageError:
            return None
        return None if data is None else data[:max_bytes]

    def _let_go(self) -> None:
        if self.leases.state(self.name) is not LeaseState.CLOSED:
            self.leases.move(self.name, LeaseState.CLOSED)


class ScriptedSealed(_Held):
    """A sealed dictionary of files."""

    async def entries(self, *, max_entries: int) -> tuple[Entry, ...]:
        """The files and the folders they imply; every file has mode 0o644."""
        folders = {
            folder
            for path in self.files
            for folder in itertools.accumulate(path.split("/")[:-1], "{}/{}".format)
        }
        found = [
            Entry(path=path, kind=EntryKind.FOLDER, mode=0o755, size=0) for path in sorted(folders)
        ]
        found += [
            Entry(path=path, kind=EntryKind.FILE, mode=0o644, size=len(data))
            for path, data in self.files.items()
        ]
        return tuple(found[:max_entries])

    async def close(self) -> None:
        """As the port says."""
        self._let_go()


class ScriptedSandbox(_Held):
    """A dictionary of files and the source's script."""

    def __init__(
        self,
        source: ScriptedSandboxes,
        leases: Leases,
        environment: Environment,
        artefacts: Mapping[str, bytes],
    ) -> None:
        files = {
            "/".join(workspace_parts(path)): text.encode()
            for path, text in environment.files.items()
        }
        super().__init__(leases.add(), leases, files)
        self._source = source
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._environment = environment
        self._artefacts = artefacts
        self.memory_lost = False
        self._used = False

    def _ensure_open(self) -> None:
        if self.leases.state(self.name) is not LeaseState.OPEN:
            raise SandboxError(f"sandbox {self.name} is not open.")

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        listen: Callable[[str, bytes], None] | None = None,
    ) -> ExecResult:
        """What the script says; whoever listens is told all of it at the end."""
        self._ensure_open()
        if not argv or (timeout_s is not None and timeout_s <= 0):
            raise UsageError(f"wanted a command and a time, got {list(argv)!r} and {timeout_s} s.")
        command = Executed(
            argv=tuple(argv),
            stdin=stdin,
            timeout_s=self._environment.exec_timeout_s if timeout_s is None else timeout_s,
            files=self.files,
            artefacts=self._artefacts,
        )
        self._source.executed.append(command)
        await self._thawed.wait()
        result = replace(self._source.script(command), memory_lost=self.memory_lost)
        self.memory_lost, self._used = result.timed_out, not result.timed_out
        if listen is not None:
            for name, text in (("stdout", result.stdout), ("stderr", result.stderr)):
                if text:
                    listen(name, text.encode())
        return result

    async def freeze(self) -> None:
        """As the port says."""
        self._ensure_open()
        self._thawed.clear()

    async def thaw(self) -> None:
        """As the port says."""
        self._ensure_open()
        self._thawed.set()

    async def usage(self) -> Usage:
        """The bytes of its files; it has no processes."""
        self._ensure_open()
        size = sum(map(len, self.files.values()))
        return Usage(memory_bytes=None, processes=0, disk_bytes=size)

    async def kill(self) -> None:
        """As the port says; nothing ever runs here."""
        self._ensure_open()
        self._end()

    def _end(self) -> None:
        """What earlier commands might have left running is gone."""
        self.memory_lost, self._used = self.memory_lost or self._used, False

    async def write(self, path: str, data: bytes) -> None:
        """As the port says."""
        self._ensure_open()
        self.files["/".join(workspace_parts(path))] = data

    async def seal(self) -> ScriptedSealed:
        """As the port says."""
        self._ensure_open()
        self.leases.move(self.name, LeaseState.SEALED)
        return ScriptedSealed(self.name, self.leases, dict(self.files))

    async def snapshot(self) -> ScriptedSealed:
        """As the port says."""
        self._ensure_open()
        self._end()
        name = self.leases.add()
        self.leases.move(name, LeaseState.SEALED)
        return ScriptedSealed(name, self.leases, dict(self.files))

    async def close(self) -> None:
        """As the port says; what was sealed belongs to its `Sealed`."""
        if self.leases.state(self.name) is not LeaseState.SEALED:
            self._let_go()
