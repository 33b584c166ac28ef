"""The demo under five seeds: does it keep its promise each time?

A seed passes where at least four trained domains improve (paired p < 0.01, ending above the best
constant answer), none of the evaluated ones falls (p < 0.05 after Holm's correction), and RL adds
to what it started from (macro, paired p < 0.05).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench.demo import measure

SEEDS = 5
MIN_IMPROVED = 4
MAX_RL_P = 0.05


def main(quick: bool) -> dict[str, Any]:
    """Five seeds of the demo; `--quick` runs the preset `smoke` under one."""
    preset, seeds = ("smoke", 1) if quick else ("demo", SEEDS)
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        runs = [measure(preset, seed=seed, folder=Path(folder)) for seed in range(seeds)]
    return {
        "seeds": len(runs),
        "seeds_passed": sum(passed(run) for run in runs),
        **{f"seed_{run['seed']}": summary(run) for run in runs},
    }


def passed(run: dict[str, Any]) -> bool:
    """Whether a run keeps the promise."""
    gain, p = run["rl_gain"], run["rl_gain_p"]
    added = gain is not None and gain > 0 and p is not None and p < MAX_RL_P
    return run["domains_improved"] >= MIN_IMPROVED and run["domains_worse"] == 0 and added


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """One seed in a table cell."""
    keys = ("domains_improved", "domains_worse", "rl_gain", "rl_gain_p", "training_minutes",
            "evaluation_minutes", "scores")  # fmt: skip
    return {key: run[key] for key in keys} | {"passed": passed(run)}
