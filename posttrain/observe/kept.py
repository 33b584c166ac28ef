"""The workspaces that a run keeps, within a budget of bytes: the oldest are let go first.

Archives lie by their hash (`blobs`), so attempts that left the same share one; `workspaces.jsonl`
beside them tells which attempt left which, oldest first, and which were let go. What is let go last
is what people may want to look at: attempts of domains on hold, and those under review. The one
thing that must stay true: all archives together are never larger than the budget once `put` has
returned, and an attempt whose archive was let go can be told from one whose archive was lost.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from posttrain.core.events import Claimed, Labelled
from posttrain.core.ports import Blobs
from posttrain.core.task import Json
from posttrain.observe.blobs import FileBlobs
from posttrain.observe.ledger import read_events

BLOBS, NAMES = "blobs", "workspaces.jsonl"


class LetGoError(KeyError):
    """The archive was there and was let go."""

    def __str__(self) -> str:
        return "it was let go, to stay within run.workspaces_mib"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spared:
    """What is let go last."""

    domains: Collection[str] = ()
    keys: Collection[str] = ()
    """Of attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStats:
    """Numbers of a run's workspaces."""

    archives: int
    size_bytes: int
    let_go: int
    """Archives that were, since the run began."""


@dataclass(slots=True)
class _Archive:
    size_bytes: int
    owners: list[tuple[str, str]]
    """Domain and key of each attempt that left it; none where the names are lost."""

    def is_spared(self, spared: Spared) -> bool:
        return any(domain in spared.domains or key in spared.keys for domain, key in self.owners)


class KeptWorkspaces:
    """What one run keeps, in its folder. One process puts; threads of it may at once."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        spared: Callable[[], Spared] = Spared,
        tell: Callable[[str], object] = lambda message: None,
    ) -> None:
        """`spared` is asked whenever something is to be let go; `tell` hears of the first time;
        both by the thread that puts.

        Raises:
            OSError: the folder cannot be read.
        """
        self._names = folder / NAMES
        self._blobs = FileBlobs(folder / BLOBS)
        self._max_bytes = max_bytes
        self._spared = spared
        self._tell = tell
        self._lock = threading.Lock()
        owners, self._let_go = _read(self._names)
        sizes = self._blobs.sizes()
        self._let_go -= sizes.keys()
        self._kept = OrderedDict(
            (sha256, _Archive(sizes[sha256], owners.get(sha256, [])))
            for sha256 in (*(one for one in sizes if one not in owners), *owners)
            if sha256 in sizes
        )
        self._size_bytes = sum(sizes.values())

    def put(self, archive: bytes, *, domain: str, key: str) -> str:
        """Keep what an attempt left, as the newest; returns its hash.

        Raises:
            OSError: the disk refused.
        """
        with self._lock:
            sha256 = self._blobs.put(archive)
            self._write({"sha256": sha256, "domain": domain, "key": key})
            kept = self._kept.setdefault(sha256, _Archive(0, []))
            self._size_bytes += len(archive) - kept.size_bytes
            kept.size_bytes = len(archive)
            kept.owners.append((domain, key))
            self._kept.move_to_end(sha256)
            self._let_go.discard(sha256)
            self._shrink()
            return sha256

    def _shrink(self) -> None:
        """Let go what is beyond the budget."""
        if self._size_bytes <= self._max_bytes:
            return
        if not self._let_go:
            self._tell(
                f"What attempts left takes more than {self._max_bytes >> 20} MiB: the oldest are "
                "let go, and cannot be judged again (run.workspaces_mib keeps more)."
            )
        spared = self._spared()
        for among_spared in (False, True):
            for sha256 in [*self._kept]:
                if self._size_bytes <= self._max_bytes:
                    return
                if self._kept[sha256].is_spared(spared) is among_spared:
                    self._remove(sha256)

    def _remove(self, sha256: str) -> None:
        self._write({"sha256": sha256, "gone": True})
        self._blobs.remove(sha256)
        self._size_bytes -= self._kept.pop(sha256).size_bytes
        self._let_go.add(sha256)

    def _write(self, line: Mapping[str, Json]) -> None:
        with self._names.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def stats(self) -> KeptStats:
        """Numbers now."""
        return KeptStats(
            archives=len(self._kept), size_bytes=self._size_bytes, let_go=len(self._let_go)
        )

    def check(self) -> None:
        """Invariants."""
        sizes = self._blobs.sizes()
        assert sizes == {sha256: one.size_bytes for sha256, one in self._kept.items()}
        assert self._size_bytes == sum(sizes.values()) <= self._max_bytes, self.stats()
        assert self._let_go.isdisjoint(self._kept), "let go and kept"


def reviewed(reviews: Path) -> set[str]:
    """Keys of the attempts that people have claimed or labelled, from a run's file of reviews.

    Raises:
        LedgerError: it cannot be read.
    """
    found = read_events(reviews) if reviews.exists() else ()
    return {one.key for one in found if isinstance(one, Claimed | Labelled)}


def archive_of(folder: Path) -> Callable[[str], bytes]:
    """Reads a run's archives by their hashes. It raises LetGoError where one was let go, and
    KeyError where it is not there or is damaged.
    """
    blobs: Blobs = FileBlobs(folder / BLOBS)
    _, let_go = _read(folder / NAMES)

    def read(sha256: str) -> bytes:
        try:
            return blobs.get(sha256)
        except KeyError:
            if sha256 in let_go:
                raise LetGoError(sha256) from None
            raise

    return read


def _read(names: Path) -> tuple[dict[str, list[tuple[str, str]]], set[str]]:
    """Hash → who left it, by the newest of them, and what was let go; a line that a crash cut is
    nobody's.
    """
    owners: dict[str, list[tuple[str, str]]] = {}
    let_go: set[str] = set()
    text = names.read_text(encoding="utf-8", errors="replace") if names.exists() else ""
    if not text.endswith("\n") and text:
        with names.open("a", encoding="utf-8") as file:
            file.write("\n")
    for line in text.splitlines():
        try:
            told = json.loads(line)
            sha256 = str(told["sha256"])
            if told.get("gone"):
                owners.pop(sha256, None)
                let_go.add(sha256)
            else:
                let_go.discard(sha256)
                owners[sha256] = [
                    *owners.pop(sha256, []), (str(told["domain"]), str(told["key"]))
                ]  # fmt: skip
        except (ValueError, TypeError, KeyError):
            continue
    return owners, let_go
