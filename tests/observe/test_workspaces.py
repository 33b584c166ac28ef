"""Kept workspaces: what is restored is what was left, and what cannot be kept is said."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from posttrain.core.containment import ExecResult, Sealed
from posttrain.core.task import (
    Artefact,
    ArtefactKind,
    Description,
    Entry,
    EntryKind,
    Environment,
    Task,
)
from posttrain.core.trajectory import AttemptKey
from posttrain.observe import workspaces
from posttrain.observe.blobs import FileBlobs
from posttrain.observe.kept import KeptWorkspaces
from posttrain.observe.workspaces import NotKeptError, keeping, pack, restored
from posttrain.sandbox.bubblewrap import BubblewrapSandboxes

WHOLE = (Artefact(name="all", kind=ArtefactKind.TREE, path="."),)
LEFT = (
    "mkdir -p deep/er locked && echo one > deep/er/file && printf '\\0\\377' > bin && "
    "chmod 640 bin && ln -s /etc/passwd link && : > 'odd\nname é' && "
    "echo x > locked/f && chmod 000 locked/f && chmod 500 locked"
)


class Listed:
    """A seal over a mapping of path to bytes."""

    def __init__(self, files: dict[str, bytes | None]) -> None:
        self.files = files
        self.closed = False

    async def read(self, path: str, *, max_bytes: int) -> bytes | None:
        data = self.files.get(path)
        return None if data is None else data[:max_bytes]

    async def entries(self, *, max_entries: int) -> tuple[Entry, ...]:
        return tuple(
            Entry(path=path, kind=EntryKind.FILE, mode=0o644, size=len(data))
            if data is not None
            else Entry(path=path, kind=EntryKind.OTHER, mode=0o755, size=0)
            for path, data in list(self.files.items())[:max_entries]
        )

    async def close(self) -> None:
        self.closed = True


async def looked_at(sealed: Sealed) -> dict[str, tuple[Entry, bytes | None]]:
    return {
        entry.path: (entry, await sealed.read(entry.path, max_bytes=100))
        for entry in await sealed.entries(max_entries=100)
    }


def test_a_restored_workspace_is_the_one_that_was_left(machine) -> None:
    async def body() -> None:
        async with BubblewrapSandboxes() as source:
            async with source.lease(Environment()) as sandbox:
                made = await sandbox.exec(("bash", "-c", LEFT))
                assert made.exit_code == 0, made.stderr
                sealed = await sandbox.seal()
            left, archive = await looked_at(sealed), await pack(sealed, WHOLE)
            assert archive == await pack(sealed, WHOLE)
            await sealed.close()
            async with restored(source, archive, Environment(files={"not": "laid again"})) as again:
                assert await looked_at(again) == left
                assert await pack(again, WHOLE) == archive
            assert left["bin"][1] == b"\0\377"
            assert left["bin"][0].mode == 0o640
            assert left["locked/f"][1] == b"x\n"
            assert {e.kind for e, _ in left.values()} == set(EntryKind) - {EntryKind.OTHER}

    asyncio.run(body())


class Slow:
    """A source whose leases take time to end, during which their user is cancelled."""

    def __init__(self) -> None:
        self.sealed = Listed({})

    @asynccontextmanager
    async def lease(self, environment: Environment) -> AsyncIterator[Slow]:
        yield self
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async def exec(self, argv: object, **more: object) -> ExecResult:
        return ExecResult(exit_code=0, stdout="", stderr="")

    async def seal(self) -> Listed:
        return self.sealed


def test_who_is_cancelled_while_the_lease_ends_leaves_no_seal() -> None:
    async def restore(source: Slow) -> None:
        async with restored(source, b"", Environment()):  # type: ignore[arg-type]
            pytest.fail("it was cancelled before")

    async def body() -> bool:
        source = Slow()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(restore(source))
        return source.sealed.closed

    assert asyncio.run(body())


def test_only_what_the_task_declares_is_kept() -> None:
    sealed = Listed({"out/a": b"1", "out/b": b"2", "secret": b"3"})
    one = (Artefact(name="a", kind=ArtefactKind.FILE, path="out/a"),)
    below = (Artefact(name="out", kind=ArtefactKind.TREE, path="out"),)
    probe = (Artefact(name="p", kind=ArtefactKind.PROBE, command="true"),)
    names = {}
    for label, artefacts in (("one", one), ("below", below), ("whole", WHOLE), ("probe", probe)):
        archive = asyncio.run(pack(sealed, artefacts))
        names[label] = [path for path in sealed.files if path.encode() in archive]
    assert names == {
        "one": ["out/a"],
        "below": ["out/a", "out/b", "secret"],
        "whole": ["out/a", "out/b", "secret"],
        "probe": [],
    }


def test_what_cannot_be_kept_whole_is_not_kept_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces, "MAX_BYTES", 10)
    monkeypatch.setattr(workspaces, "MAX_ENTRIES", 3)
    task = Task(
        domain="d", level=0, seed=0, description=Description(objective="o"), artefacts=WHOLE
    )
    kept_here = KeptWorkspaces(tmp_path, max_bytes=1 << 20)
    keep = functools.partial(keeping(kept_here), AttemptKey(run="r", draw=0, member=0))
    for files, why in (
        ({"a": b"x" * 11}, "more than 10 bytes"),
        (dict.fromkeys("abcd", b""), "more than 3 entries"),
        ({"\\xff": b""}, "may be no UTF-8"),
        ({"too/deep": None}, "cannot be looked into"),
    ):
        assert why in asyncio.run(keep(task, Listed(files)))["lost"]
        with pytest.raises(NotKeptError):
            asyncio.run(pack(Listed(files), WHOLE))
    kept = asyncio.run(keep(task, Listed({"a": b"x"})))
    assert len(FileBlobs(tmp_path / "blobs").get(kept["sha256"])) > 512


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_disk_that_refuses_is_no_error_of_the_attempt(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    task = Task(domain="d", level=0, seed=0, description=Description(objective="o"))
    keep = keeping(KeptWorkspaces(tmp_path, max_bytes=1 << 20))
    kept = asyncio.run(keep(AttemptKey(run="r", draw=0, member=0), task, Listed({})))
    assert "Permission denied" in kept["lost"]
