"""What checks see of a sealed workspace: the artefacts that the task declares, and nothing else.

A `file` is read, and copied into a checker's sandbox; with a `tree` the sealed file system is
mounted there, whole. The one thing that must stay true: what a task does not declare decides no
verdict.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import PurePosixPath

from posttrain.core.containment import Sealed
from posttrain.core.errors import UsageError
from posttrain.core.task import Artefact, ArtefactKind, Entry
from posttrain.sandbox.spec import WORKSPACE

MAX_COPY_BYTES = 8 << 20
"""A larger file is not copied: a program finds nothing in its place."""
MAX_COPIES_BYTES = 16 << 20
"""Of all copies together; those declared later are left out."""
LOG = "-wal"
"""A database comes with its write-ahead log."""


class Declared:
    """A sealed workspace (`containment.Sealed`) through the artefacts of its task."""

    def __init__(self, sealed: Sealed, artefacts: Sequence[Artefact]) -> None:
        self._sealed = sealed
        self._files = _paths(artefacts, ArtefactKind.FILE)
        self._trees = _paths(artefacts, ArtefactKind.TREE)

    @property
    def mount(self) -> Sealed | None:
        """What is mounted beside a checker: the workspace, where a tree is declared."""
        return self._sealed if self._trees else None

    async def copies(self) -> dict[str, str]:
        """The declared files that are there, as base64."""
        found, room = {}, MAX_COPIES_BYTES
        for path in (path for file in self._files for path in (file, file + LOG)):
            data = await self._sealed.read(path, max_bytes=MAX_COPY_BYTES + 1)
            if data is not None and len(data) <= min(MAX_COPY_BYTES, room):
                found[path] = base64.b64encode(data).decode()
                room -= len(data)
        return found

    def declares(self, path: str) -> bool:
        """Whether a path is a declared file or lies in a declared tree."""
        place = _clean(path)
        inside = any(place.is_relative_to(tree) for tree in self._trees)
        return inside or str(place).removesuffix(LOG) in self._files

    def ensure(self, path: str) -> None:
        """Refuse to look at what is not declared.

        Raises:
            UsageError: neither a declared file nor inside a declared tree.
        """
        if not self.declares(path):
            raise UsageError(
                f"a check looks at {path!r}, which the task does not declare.",
                "add it to the task's artefacts: a file, or a tree that holds it.",
            )

    async def read(self, path: str, *, max_bytes: int) -> bytes | None:
        """As `Sealed.read`.

        Raises:
            UsageError: the path is not declared.
        """
        self.ensure(path)
        return await self._sealed.read(path, max_bytes=max_bytes)

    async def entries(self, *, max_entries: int) -> tuple[Entry, ...]:
        """As `Sealed.entries`: what is declared, and what stands on the way there; all that came
        where there may be more, so that a flood of other files hides nothing.
        """
        found = await self._sealed.entries(max_entries=max_entries)
        if len(found) >= max_entries:
            return found
        ways = {str(way) for path in self._files for way in PurePosixPath(path).parents}
        return tuple(entry for entry in found if entry.path in ways or self.declares(entry.path))

    async def close(self) -> None:
        """The attempt's own affair."""


def _paths(artefacts: Sequence[Artefact], kind: ArtefactKind) -> tuple[str, ...]:
    return tuple(str(_clean(one.path)) for one in artefacts if one.kind is kind)


def _clean(path: str) -> PurePosixPath:
    return PurePosixPath(path.removeprefix(f"{WORKSPACE}/"))
