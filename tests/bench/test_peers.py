"""Peers in environments of their own: found or said to be missing, their best against our worst."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench import _peers, orchestration

PROGRAM = """
import json, os, sys
work = json.load(open(sys.argv[1]))
print("a peer's own words")
print(json.dumps({"work": work, "options": sys.argv[2:], "threads": os.getenv("OMP_NUM_THREADS")}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_peers, "FOLDER", tmp_path)
    (tmp_path / "told.py").write_text(PROGRAM, "utf-8")
    return tmp_path


def test_a_missing_peer_is_none_and_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _peers.set_to("some", "told.py", {}) is None
    assert "some is not measured: next: bench/peers/setup.sh some" in capsys.readouterr().out


def test_a_peer_gets_its_work_and_not_our_number_of_threads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = folder / "envs" / "some" / "bin" / "python"
    python.parent.mkdir(parents=True)
    os.symlink(sys.executable, python)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = _peers.set_to("some", "told.py", {"count": 3}, "--only", "x")
    assert found == {"work": {"count": 3}, "options": ["--only", "x"], "threads": None}


def test_a_ratio_is_our_slowest_over_their_fastest_of_the_worse_kind() -> None:
    cells = [
        {"kind": "answer", "rollouts_per_s": 10.0},
        {"kind": "answer", "rollouts_per_s": 40.0},
        {"kind": "tools", "rollouts_per_s": 5.0},
        {"kind": "tools", "rollouts_per_s": 4.0},
    ]
    assert orchestration.ratio({"answer": 120.0, "tools": 20.0}, cells) == 3.0
    assert orchestration.ratio({"answer": 120.0, "tools": 10.0}, cells) == 2.0


def test_peers_that_are_missing_make_null_ratios(folder: Path) -> None:
    found = orchestration.beside({"answer": 1.0, "tools": 1.0}, quick=True)
    assert found == {"peers": {}, "ratio_vs_verifiers": None, "ratio_vs_inspect": None}
