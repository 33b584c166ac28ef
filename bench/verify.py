"""Verdicts a second, and what isolation adds to them.

`math_per_s` is null until there is a kind of check for symbolic mathematics.
"""

from __future__ import annotations

from typing import Any

from bench._code_verdicts import code_verdicts

GOALS = {"code_per_s": 40.0, "isolation_ms_p95": 25.0}


def main(quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"math_per_s": None, **code_verdicts(quick)}
    slow = found["code_per_s"] < GOALS["code_per_s"]
    late = found["isolation_ms_p95"] > GOALS["isolation_ms_p95"]
    missed = [name for name, is_missed in zip(GOALS, (slow, late), strict=True) if is_missed]
    return {**found, "goals_missed": missed}
