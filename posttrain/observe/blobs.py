"""Large bodies by content hash: `<first two digits>/<sha256>` in one folder.

Not a cache: nothing is ever changed, and goes only when it is removed by name. The one thing that
must stay true: what `get` returns has the hash it was asked for, whatever crash or disk came
between.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path


class FileBlobs:
    """A content-addressed folder; many processes may use it at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, data: bytes) -> str:
        """Store; returns the SHA-256 in hexadecimal. Stored already: nothing is written.

        Raises:
            OSError: the disk refused; nothing half-written remains under the hash.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        path = self._path(sha256)
        if not self._holds(path, sha256):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
        return sha256

    def get(self, sha256: str) -> bytes:
        """The bytes.

        Raises:
            KeyError: there are none under this hash, or they are damaged.
        """
        path = self._path(sha256)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise KeyError(f"no blob {sha256} in {self._directory}") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise KeyError(f"blob {sha256} in {self._directory} is damaged")
        return data

    def remove(self, sha256: str) -> None:
        """Let one go. Idempotent.

        Raises:
            OSError: the disk refused.
        """
        self._path(sha256).unlink(missing_ok=True)

    def sizes(self) -> dict[str, int]:
        """Bytes of each that there is, by its hash, the one written first coming first."""
        files = [path for path in self._directory.glob("??/*") if len(path.name) == 64]
        found = sorted((path.stat().st_mtime_ns, path.name, path.stat().st_size) for path in files)
        return {name: size for _, name, size in found}

    def _holds(self, path: Path, sha256: str) -> bool:
        return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256

    def _path(self, sha256: str) -> Path:
        if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
            raise KeyError(f"{sha256[:80]!r} is no SHA-256 in hexadecimal")
        return self._directory / sha256[:2] / sha256


def write_whole(path: Path, data: bytes) -> None:
    """Write a file aside and rename it: it is complete or as it was.

    Raises:
        OSError: the disk refused; nothing half-written remains.
    """
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=".aside-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
