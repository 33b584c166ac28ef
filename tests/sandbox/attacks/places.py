"""Where attacks are tried: in a sandbox, and in a plain process as a careless harness has it.

What the careless place does with a command, its files and its end is what harnesses are known to
do; each careless method is the control of some attack. The one thing that must stay true: whatever
an attack leaves at the careless place is gone after `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.core.containment import Cause, ExecResult, Sandbox, Sandboxes, Sealed
from posttrain.core.task import Environment
from tests.sandbox.attacks.attack import Probe, program
from tests.sandbox.attacks.probe import HELD, Held
from tests.sandbox.conftest import processes_named


@dataclass(slots=True)
class Place:
    """What both kinds have."""

    facts: dict[str, Any]
    """Of the host, for programs to look for."""
    resolver: socket.socket
    """Where the host's resolver would hear of questions."""
    marker: str = field(default_factory=lambda: f"attack-{uuid.uuid4().hex}")
    """In the command line of every process of this place."""
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def given(self, more: dict[str, Any]) -> str:
        """What a program of this place is told."""
        unprotected = isinstance(self, Outside)
        told = {**self.facts, "marker": self.marker, "unprotected": unprotected, **more}
        return json.dumps(told)

    def scratch(self) -> Path:
        """A folder of the host for as long as this place."""
        folder = Path(tempfile.mkdtemp())
        self.stack.callback(shutil.rmtree, folder)
        return folder

    def left(self) -> bool:
        """Whether a process of this place is alive."""
        return bool(processes_named(self.marker))

    async def close(self) -> None:
        await self.stack.aclose()
        assert not self.left(), "processes are left"


def told(stdout: str, stderr: str, code: int | None, *, may_die: bool) -> Any:
    """What a program found; `Held` where something was in its way."""
    if code != 0:
        assert may_die, f"the attack is broken: {code} {stdout[-2000:]} {stderr[-2000:]}"
        raise Held(f"ended with {code}")
    met = json.loads(stdout.splitlines()[-1])
    if met["met"] == HELD:
        raise Held(met["reason"])
    return met["found"]


@dataclass(slots=True)
class Left:
    """What was sealed of a sandbox."""

    sealed: Sealed

    async def read(self, path: str) -> bytes | None:
        return await self.sealed.read(path, max_bytes=1 << 20)

    async def names(self) -> list[str]:
        return [entry.path for entry in await self.sealed.entries(max_entries=4096)]


@dataclass(slots=True)
class Inside(Place):
    """A sandbox."""

    beside = "/artefacts"
    """Where a checker finds what was left."""
    source: Sandboxes = field(kw_only=True)
    environment: Environment = field(kw_only=True)
    sandbox: Sandbox = field(init=False)

    async def open(self, *, over: Sealed | None = None, beside: Sealed | None = None) -> Inside:
        lease = self.source.lease(self.environment, over=over, beside=beside)
        self.sandbox = await self.stack.enter_async_context(lease)
        return self

    async def _another(
        self, environment: Environment | None = None, **lease: Sealed | None
    ) -> Inside:
        other = Inside(
            self.facts,
            self.resolver,
            source=self.source,
            environment=environment or self.environment,
        )
        self.stack.push_async_callback(other.close)
        return await other.open(**lease)

    async def exec(self, function: Probe, *, timeout_s: float = 10.0, **more: Any) -> ExecResult:
        argv = ("python3", "-S", "-c", program(function), self.given(more))
        return await self.sandbox.exec(argv, timeout_s=timeout_s)

    async def run(
        self, function: Probe, *, timeout_s: float = 10.0, may_die: bool = False, **more: Any
    ) -> Any:
        """What a program found here."""
        ran = await self.exec(function, timeout_s=timeout_s, **more)
        return told(ran.stdout, ran.stderr, ran.exit_code, may_die=may_die)

    async def shell(self, line: str, *, timeout_s: float = 10.0) -> ExecResult:
        return await self.sandbox.exec(("sh", "-c", line), timeout_s=timeout_s)

    async def login(self) -> None:
        """Start a login shell."""
        await self.sandbox.exec(("bash", "-l", "-c", ":"))

    async def read(self, path: str) -> bytes | None:
        return await self.sandbox.read(path, max_bytes=1 << 20)

    async def end(self) -> None:
        """End whatever runs here."""
        await self.sandbox.kill()

    async def snapshot(self) -> Sealed:
        sealed = await self.sandbox.snapshot()
        self.stack.push_async_callback(sealed.close)
        return sealed

    async def seal(self) -> Left:
        sealed = await self.sandbox.seal()
        self.stack.push_async_callback(sealed.close)
        return Left(sealed)

    async def neighbour(self) -> Inside:
        """Another one at the same time."""
        return await self._another()

    async def successor(self) -> Inside:
        """The next one, once this one is gone."""
        await self.sandbox.close()
        return await self._another()

    async def fork(self) -> Inside:
        """One that goes on from what is here."""
        return await self._another(over=await self.snapshot())

    async def checker(self, environment: Environment | None = None) -> Inside:
        """A fresh one with what was left here beside it."""
        return await self._another(environment or Environment(), beside=(await self.seal()).sealed)

    async def build(self, text: str) -> bool:
        """Make a program of C called `attack`; whether there is a compiler."""
        await self.sandbox.write("attack.c", text.encode())
        return (await self.shell("cc -O1 -w -o attack attack.c")).exit_code == 0

    async def works(self) -> None:
        """A command runs, whatever it gives: never an error of the sandbox."""
        assert (await self.shell("true")).cause in (
            Cause.EXITED, Cause.SIGNALLED, Cause.OUT_OF_MEMORY
        )  # fmt: skip


@dataclass(slots=True)
class Outside(Place):
    """A plain process in a folder."""

    beside = "."
    folder: Path = field(kw_only=True)
    descriptor: int = field(kw_only=True)
    """One that programs here inherit."""
    group: int | None = field(init=False, default=None)
    """Of the program started last."""

    async def open(self, environment: Environment) -> Outside:
        self.folder.mkdir()
        for path, text in environment.files.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_text(text)
        for line in environment.setup:
            subprocess.run(["sh", "-c", line], cwd=self.folder, check=True)
        self.stack.callback(self._sweep)
        return self

    def _sweep(self) -> None:
        for _ in range(1000):
            self.kill_left()
            if not self.left():
                break
        subprocess.run(["rm", "-rf", str(self.folder)], check=True)

    def started(self, function: Probe, **more: Any) -> subprocess.Popen[bytes]:
        """A program that runs here, in a session of its own."""
        argv = [sys.executable, "-S", "-c", program(function), self.given(more)]
        process = subprocess.Popen(
            argv, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True, pass_fds=(self.descriptor,),
        )  # fmt: skip
        self.group = process.pid
        return process

    def capture(self, function: Probe, **more: Any) -> subprocess.CompletedProcess[bytes]:
        """What a careless harness does: everything is kept, until everybody has closed it."""
        with self.started(function, **more) as process:
            out, error = process.communicate(timeout=30)
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    def kill_left(self) -> None:
        """Everything of this place, once."""
        for pid in processes_named(self.marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def run(
        self, function: Probe, *, timeout_s: float = 10.0, may_die: bool = False, **more: Any
    ) -> Any:
        """What a program found here; no time limit holds."""
        ran = await asyncio.to_thread(self.capture, function, **more)
        return told(ran.stdout.decode(), ran.stderr.decode(), ran.returncode, may_die=may_die)

    async def login(self) -> None:
        """Start a login shell at home here."""
        home = {**os.environ, "HOME": str(self.folder)}
        subprocess.run(["bash", "-l", "-c", ":"], cwd=self.folder, env=home, check=False)

    async def read(self, path: str) -> bytes | None:
        return (self.folder / path).read_bytes()

    async def names(self) -> list[str]:
        """By the lines of `ls`."""
        ran = subprocess.run(["ls", "-A"], cwd=self.folder, capture_output=True, check=True)
        return ran.stdout.decode("utf-8", "backslashreplace").splitlines()

    async def end(self) -> None:
        """A polite signal to the group of the program that was started last."""
        assert self.group is not None, "nothing was started here"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGTERM)

    async def snapshot(self) -> Outside:
        return self

    async def seal(self) -> Outside:
        return self

    async def neighbour(self) -> Outside:
        folder = self.folder.with_name(uuid.uuid4().hex)
        other = Outside(self.facts, self.resolver, folder=folder, descriptor=self.descriptor)
        self.stack.push_async_callback(other.close)
        return await other.open(Environment())

    async def successor(self) -> Outside:
        """The same folder again, as whoever saves the set-up does."""
        return self

    async def fork(self) -> Outside:
        """A copy by hard links, as whoever saves the copying does."""
        other = await self.neighbour()
        shutil.copytree(
            self.folder, other.folder, copy_function=os.link, dirs_exist_ok=True
        )  # fmt: skip
        return other

    async def checker(self, environment: Environment | None = None) -> Outside:
        """The same folder, with the checker's files added."""
        for path, text in (environment or Environment()).files.items():
            (self.folder / path).write_text(text)
        return self


async def changes(place: Inside | Left | Outside, path: str) -> bool:
    """Whether a file changes: for a moment where it must not, for long where it must."""
    within_s = 10.0 if isinstance(place, Outside) else 0.3
    before, until = await place.read(path), time.monotonic() + within_s
    while time.monotonic() < until:
        if await place.read(path) != before:
            return True
    return False
