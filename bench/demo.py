"""The demo, measured: how long it takes, what improves, what falls, and what RL adds.

It runs the command a person runs (`posttrain train --preset demo`) in a folder of its own and
reads the run's record. Minutes are the run's own: training, and what each evaluation took when it
was computed, a base evaluation that came from the cache included.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from posttrain.evals import report


def main(quick: bool) -> dict[str, Any]:
    """One run under seed 0; `--quick` runs the preset `smoke` to show that the bench works."""
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        return measure("smoke" if quick else "demo", seed=0, folder=Path(folder))


def measure(preset: str, *, seed: int, folder: Path) -> dict[str, Any]:
    """Run a preset under a seed and tell what became of it. Runs of one folder share the cache of
    base evaluations.
    """
    name = f"seed-{seed}"
    command = [
        *(sys.executable, "-m", "posttrain.cli.main", "train", "--preset", preset),
        *("--run", name, "--set", f"run.seed={seed}"),
    ]
    subprocess.run(command, env={**os.environ, "POSTTRAIN_RUNS": str(folder)}, check=True)
    return told(report.load(folder / name)) | {"preset": preset, "seed": seed}


def told(data: report.ReportData) -> dict[str, Any]:
    """The bench's keys from a run's record."""
    outcomes = data.outcomes
    training_s = sum(sum(step.seconds.values()) for step in data.steps)
    evaluation_s = sum(each.duration_s for each in outcomes.evaluations.values())
    return {
        "minutes": (training_s + evaluation_s) / 60,
        "training_minutes": training_s / 60,
        "evaluation_minutes": evaluation_s / 60,
        "steps": len(data.steps),
        "domains_improved": len(outcomes.improved),
        "domains_worse": len(outcomes.fallen),
        "rl_gain": outcomes.rl_gain,
        "rl_gain_p": outcomes.rl_gain_p,
        "improved": list(outcomes.improved),
        "worse": list(outcomes.fallen),
        "scores": {
            change.domain: {point: score.rate for point, score in change.scores.items()}
            | {
                "constant": change.constant.rate if change.constant else None,
                "p": change.comparison.p if change.comparison else None,
            }
            for change in outcomes.changes
        },
    }
