from __future__ import annotations

import json
import os

import pytest
import torch

from posttrain.core.errors import CheckpointError
from posttrain.train import checkpoint


def kept(folder, *, run="run", keep=1):
    return checkpoint.RotatingCheckpoints(directory=folder, run=run, keep=keep)


def place(folder, step):
    return kept(folder).place(step)


def save(folder, step, *, run="run", save_model=None):
    def model(directory):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")

    content = checkpoint.Content(
        tensors={"optimizer": {"masters": torch.zeros(3)}}, state={"run": run, "step": step}
    )
    for _ in checkpoint.write(place(folder, step), content, save_model=save_model or model):
        pass


def steps(folder, run="run"):
    return list(kept(folder, run=run).saved())


def test_order_is_by_step_number_with_equal_times_BR_60(tmp_path):
    for step in (1000, 90, 200):
        save(tmp_path, step)
        os.utime(place(tmp_path, step), (1, 1))
    kept(tmp_path, keep=2).retire(1000)
    assert steps(tmp_path) == [200, 1000]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000200", "step-001000"]


def test_steps_beyond_six_digits_still_sort_by_number(tmp_path):
    for step in (999_999, 1_000_000, 2):
        save(tmp_path, step)
    assert steps(tmp_path) == [2, 999_999, 1_000_000]


def test_a_high_step_of_another_run_neither_counts_nor_is_resumed_BR_60(tmp_path):
    save(tmp_path, 5000, run="other")
    save(tmp_path, 10)
    kept(tmp_path).retire(10)
    assert kept(tmp_path).saved() == {10: place(tmp_path, 10)}
    assert steps(tmp_path, run="other") == [5000]


def test_a_failed_save_removes_nothing_BR_60(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)

    def failing(_):
        raise OSError("disk full")

    with pytest.raises(CheckpointError):
        save(tmp_path, 3, save_model=failing)
    assert steps(tmp_path) == [1, 2]


def test_a_stale_higher_step_never_costs_the_one_just_saved_its_place_BR_60(tmp_path):
    """The checkpoint that the ledger named last was removed in favour of an older one of a higher
    step, which the ledger has rewound.
    """
    save(tmp_path, 5000)
    for step in (9, 10):
        save(tmp_path, step)
        kept(tmp_path).retire(step)
        assert place(tmp_path, step).exists()
    assert steps(tmp_path) == [10, 5000]


def test_an_incomplete_checkpoint_does_not_count(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    file = place(tmp_path, 2) / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-xyz").mkdir()
    assert steps(tmp_path) == [1]
    kept(tmp_path).retire(1)
    assert place(tmp_path, 2).exists()


def test_a_folder_that_is_not_there_holds_none(tmp_path):
    assert steps(tmp_path / "absent") == []
    kept(tmp_path / "absent").sweep()


def test_what_a_killed_save_left_is_swept(tmp_path):
    save(tmp_path, 1)
    left = tmp_path / ".step-000002-abc"
    left.mkdir()
    (left / "part").write_text("x")
    kept(tmp_path).sweep()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001"]


def test_the_manifest_lists_every_file_with_size_and_hash(tmp_path):
    save(tmp_path, 1)
    folder = place(tmp_path, 1)
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert set(listed) == there - {"manifest.json"}
    assert all(len(entry["sha256"]) == 64 for entry in listed.values())
