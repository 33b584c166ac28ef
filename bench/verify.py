"""Verdicts a second, on mathematics and on code, and what isolation adds to those on code."""

from __future__ import annotations

from typing import Any

from bench._code_verdicts import code_verdicts
from bench._math_verdicts import math_verdicts

GOALS = {"math_per_s": 500.0, "code_per_s": 40.0, "isolation_ms_p95": 25.0}


def main(quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {**math_verdicts(quick), **code_verdicts(quick)}
    missed = [
        name
        for name, goal in GOALS.items()
        if (found[name] > goal if name == "isolation_ms_p95" else found[name] < goal)
    ]
    return {**found, "goals_missed": missed}
