from __future__ import annotations

from pathlib import Path

from posttrain.loop.checkpoints import RotatingCheckpoints
from posttrain.train import checkpoint


def save(checkpoints: RotatingCheckpoints, step: int) -> None:
    def model(directory: Path) -> None:
        directory.mkdir(parents=True)

    content = checkpoint.Content(tensors={}, state={"run": checkpoints.run, "step": step})
    for _ in checkpoint.write(checkpoints.place(step), content, save_model=model):
        pass


def test_a_stale_higher_step_never_costs_the_one_just_saved_its_place(tmp_path: Path) -> None:
    """BR-60: the checkpoint that the ledger named last was removed in favour of an older one of a
    higher step, which the ledger has rewound.
    """
    checkpoints = RotatingCheckpoints(directory=tmp_path, run="run", keep=1)
    save(checkpoints, 5000)
    for step in (9, 10):
        save(checkpoints, step)
        checkpoints.retire(step)
        assert checkpoints.place(step).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-005000"]
