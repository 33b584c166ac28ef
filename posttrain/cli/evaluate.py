"""`posttrain eval`: held-out evaluation of a run's latest weights, or of a model."""

from __future__ import annotations


def evaluate(target: str) -> None:
    """X."""
    del target
