"""Workspaces that attempts left, as archives: what a later verification looks at again.

Not a seal: an archive is bytes, and `restored` makes a sealed workspace of it once more. The one
thing that must stay true: a workspace that cannot be kept whole is not kept at all, and the reason
is.
"""

from __future__ import annotations

import asyncio
import functools
import io
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from posttrain.core.containment import Sandboxes, Sealed
from posttrain.core.errors import InfraError, SandboxError
from posttrain.core.task import (
    Artefact,
    ArtefactKind,
    Entry,
    EntryKind,
    Environment,
    Json,
    Network,
    Task,
)
from posttrain.core.trajectory import AttemptKey
from posttrain.observe.kept import KeptWorkspaces

MAX_BYTES = 8 << 20
"""Of the files of a workspace together."""
MAX_ENTRIES = 4_096
_KINDS = {
    EntryKind.FILE: tarfile.REGTYPE,
    EntryKind.FOLDER: tarfile.DIRTYPE,
    EntryKind.LINK: tarfile.SYMTYPE,
}
_UNPACK = """
import sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
    archive.extraction_filter = lambda member, path: member
    archive.extractall(".")
"""
"""Runs inside a sandbox, where an archive can harm nothing."""


class NotKeptError(Exception):
    """Why a workspace is not kept."""


async def pack(sealed: Sealed, artefacts: Sequence[Artefact]) -> bytes:
    """What a task declares of a workspace, as a tar archive with the same bytes for the same
    workspace. A link is kept as one that leads nowhere, as verifiers never follow any.

    Raises:
        NotKeptError: it is too large, or has names that an archive cannot give back.
    """
    entries = await sealed.entries(max_entries=MAX_ENTRIES + 1)
    if len(entries) > MAX_ENTRIES:
        raise NotKeptError(f"more than {MAX_ENTRIES} entries")
    kept = [entry for entry in entries if _is_declared(entry, artefacts)]
    if sum(entry.size for entry in kept if entry.kind is EntryKind.FILE) > MAX_BYTES:
        raise NotKeptError(f"more than {MAX_BYTES} bytes")
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in sorted(kept, key=lambda entry: entry.path):
            if "\\x" in entry.path:
                raise NotKeptError(f"the name {entry.path!r:.80} may be no UTF-8")
            if entry.kind not in _KINDS:
                raise NotKeptError(f"{entry.path!r:.80} cannot be looked into")
            member = tarfile.TarInfo(entry.path)
            member.type, member.mode, data = _KINDS[entry.kind], entry.mode, b""
            if entry.kind is EntryKind.FILE:
                data = await _read(sealed, entry)
                member.size = len(data)
            elif entry.kind is EntryKind.LINK:
                member.linkname = "-" * entry.size
            archive.addfile(member, io.BytesIO(data))
    return into.getvalue()


async def _read(sealed: Sealed, entry: Entry) -> bytes:
    data = await sealed.read(entry.path, max_bytes=entry.size + 1)
    if data is None or len(data) != entry.size:
        raise NotKeptError(f"{entry.path!r:.80} cannot be read")
    return data


def _is_declared(entry: Entry, artefacts: Sequence[Artefact]) -> bool:
    """Whether verifiers may look at it: at everything where a tree is declared."""
    for artefact in artefacts:
        place = artefact.path.strip("/").removeprefix("./")
        if artefact.kind is ArtefactKind.TREE:
            return True
        if artefact.kind is ArtefactKind.FILE and (
            entry.path == place or place.startswith(f"{entry.path}/")
        ):
            return True
    return False


@asynccontextmanager
async def restored(
    sandboxes: Sandboxes, archive: bytes, environment: Environment
) -> AsyncIterator[Sealed]:
    """The workspace of an archive, sealed again, in the kind of sandbox it was made in.

    Raises:
        SandboxError: it could not be unpacked.
    """
    bare = replace(
        environment, files={}, setup=(), read_only=(), hidden=(), network=Network(),
        exec_timeout_s=60.0,
    )  # fmt: skip
    command = ("python3", "-I", "-S", "-B", "-c", _UNPACK)
    async with AsyncExitStack() as stack:
        async with sandboxes.lease(bare) as sandbox:
            unpacked = await sandbox.exec(command, stdin=archive)
            if unpacked.exit_code != 0:
                why = unpacked.stderr[-300:]
                raise SandboxError(f"a kept workspace could not be unpacked: {why}")
            sealed = await sandbox.seal()
            stack.push_async_callback(sealed.close)  # before the lease ends, which takes time
        yield sealed


def keeping(
    workspaces: KeptWorkspaces,
) -> Callable[[AttemptKey, Task, Sealed], Awaitable[Mapping[str, Json]]]:
    """Keeps what a task declares of a workspace under its hash. What cannot be kept is said, and
    stops nobody: `{"sha256": …}` or `{"lost": why}`.
    """

    async def keep(key: AttemptKey, task: Task, sealed: Sealed) -> Mapping[str, Json]:
        try:
            archive = await pack(sealed, task.artefacts)
            put = functools.partial(workspaces.put, archive, domain=task.domain, key=key.hex)
            return {"sha256": await asyncio.to_thread(put)}
        except (NotKeptError, OSError, InfraError) as error:
            return {"lost": str(error)}

    return keep
