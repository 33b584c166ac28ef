import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from posttrain.observe.blobs import FileBlobs


def test_bytes_come_back_under_their_hash(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path / "blobs")
    for data in (b"", b"hello", os.urandom(100_000)):
        sha256 = blobs.put(data)
        assert sha256 == hashlib.sha256(data).hexdigest() == blobs.put(data)
        assert blobs.get(sha256) == data
    assert len([path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]) == 3


def test_absent_damaged_and_malformed_hashes_are_key_errors(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    sha256 = blobs.put(b"hello")
    path = tmp_path / sha256[:2] / sha256
    path.write_bytes(b"hellO")
    with pytest.raises(KeyError, match="damaged"):
        blobs.get(sha256)
    assert blobs.put(b"hello") == sha256  # putting again mends it
    assert blobs.get(sha256) == b"hello"
    with pytest.raises(KeyError, match="no blob"):
        blobs.get("0" * 64)
    with pytest.raises(KeyError, match="no SHA-256"):
        blobs.get("../../etc/passwd")


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    blobs = FileBlobs(tmp_path)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        blobs.put(b"hello")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
