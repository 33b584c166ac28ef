"""Doubles of the ports verification needs, close enough to the real thing to run the harness."""

import asyncio
import importlib
import json
import os
import stat
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from posttrain.core.clock import ManualClock
from posttrain.core.containment import ExecResult
from posttrain.core.errors import WorkerError
from posttrain.core.task import (
    Artefact,
    ArtefactKind,
    Description,
    Entry,
    EntryKind,
    Environment,
    Task,
)
from posttrain.core.trajectory import AttemptKey, Trajectory, Turn
from posttrain.verify.declared import Declared
from posttrain.verify.execution import ARTEFACTS
from posttrain.verify.kinds import Subject, Tools


class InlineWorkers:
    """Calls the function here; exceptions become what a killed worker reports."""

    async def call(self, function, *arguments, timeout_s):
        module, _, name = function.partition(":")
        try:
            result = getattr(importlib.import_module(module), name)(*arguments)
            return json.loads(json.dumps(result))
        except Exception as error:
            raise WorkerError(f"{type(error).__name__}: {error}") from error


@dataclass
class FolderSealed:
    """A folder as a sealed workspace; links are not followed."""

    root: Path

    async def read(self, path, *, max_bytes):
        current = self.root
        for part in Path(path).parts:
            current = current / part
            if current.is_symlink():
                return None
        if not current.exists() or not stat.S_ISREG(os.lstat(current).st_mode):
            return None
        return current.read_bytes()[:max_bytes]

    async def entries(self, *, max_entries):
        found = []
        for folder, folders, names in os.walk(self.root):
            for name in (*folders, *names):
                path = Path(folder) / name
                status = path.lstat()
                kind = (EntryKind.LINK if path.is_symlink() else EntryKind.FOLDER if path.is_dir()
                        else EntryKind.FILE if path.is_file() else EntryKind.OTHER)  # fmt: skip
                mode, inside = stat.S_IMODE(status.st_mode), str(path.relative_to(self.root))
                found.append(Entry(path=inside, kind=kind, mode=mode, size=status.st_size))
        return tuple(found[:max_entries])

    async def close(self):
        pass


class ProcessSandbox:
    """Runs commands as plain processes in a folder: no containment, for our own harness only."""

    def __init__(self, folder, sealed):
        self._folder, self._sealed = folder, sealed

    async def exec(self, argv, *, timeout_s=None, stdin=b""):
        if self._sealed is not None:
            stdin = stdin.replace(json.dumps(ARTEFACTS).encode(),
                                  json.dumps(str(self._sealed.root)).encode())  # fmt: skip
        command = [sys.executable, *argv[1:]]
        try:
            ended = await asyncio.to_thread(
                subprocess.run, command, input=stdin, capture_output=True, cwd=self._folder,
                timeout=timeout_s, env={"PATH": "/usr/bin:/bin"}, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            said = (late.stderr or b"").decode()
            return ExecResult(exit_code=None, stdout="", stderr=said, timed_out=True)
        return ExecResult(
            exit_code=ended.returncode if ended.returncode >= 0 else None,
            stdout=ended.stdout.decode(errors="replace"),
            stderr=ended.stderr.decode(errors="replace"),
        )


@dataclass
class ProcessSandboxes:
    """A source of such sandboxes, one folder each."""

    root: Path
    leased: list[Environment] = field(default_factory=list)
    ahead: list[tuple[str, ...]] = field(default_factory=list)

    @asynccontextmanager
    async def lease(self, environment, *, beside=None, over=None, ahead=()):
        folder = self.root / f"sandbox-{len(self.leased)}"
        self.leased.append(environment)
        self.ahead.append(ahead)
        for path, text in environment.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        yield ProcessSandbox(folder, beside)


class RepliedSandboxes:
    """Answers every command with results named beforehand."""

    def __init__(self, *results):
        self.results, self.calls = list(results), []

    @asynccontextmanager
    async def lease(self, environment, *, beside=None, over=None, ahead=()):
        yield self

    async def exec(self, argv, *, timeout_s=None, stdin=b""):
        self.calls.append((argv, timeout_s, json.loads(stdin)))
        result = self.results.pop(0)
        return result(self.calls[-1][2]) if callable(result) else result


EVERYTHING = (Artefact(name="all", kind=ArtefactKind.TREE, path="."),)


def attempt(
    reply="", *, checks=(), objective="Say the word.", prefix="", environment=None,
    artefacts=EVERYTHING,
):  # fmt: skip
    task = Task(domain="test.one", level=0, seed=1, prefix=prefix, checks=tuple(checks),
                description=Description(objective=objective), environment=environment,
                artefacts=artefacts)  # fmt: skip
    turns = (Turn(text=reply),)
    return Trajectory(key=AttemptKey(run="r", draw=0, member=0), task=task, turns=turns)


@pytest.fixture
def make_attempt():
    return attempt


@pytest.fixture
def clock():
    return ManualClock(auto_jump=True)


@pytest.fixture
def workers():
    return InlineWorkers()


@pytest.fixture
def replied():
    return RepliedSandboxes


@pytest.fixture
def workspace(tmp_path):
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.fixture
def tools(tmp_path, clock, workers):
    return Tools(clock=clock, workers=workers, sandboxes=ProcessSandboxes(tmp_path))


@pytest.fixture
def find(tools, workspace):
    """The finding of one check over a reply and the workspace folder."""

    def run(kind, check, reply="", **more):
        trajectory = attempt(reply, environment=Environment(), **more)
        left = Declared(FolderSealed(workspace), trajectory.task.artefacts)
        subject = Subject(trajectory=trajectory, sealed=left)
        return asyncio.run(kind(check, subject, tools))

    return run
