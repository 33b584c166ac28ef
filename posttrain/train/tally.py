"""Metrics as sums and counts, so that a mean over parts is the mean over their tokens (BR-04).

Not a log. The one thing that must stay true: a metric without a single valid token is absent.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Tally:
    """Collects metrics over the micro-batches of a step.

    >>> tally = Tally()
    >>> tally.mean("kl", torch.ones(10)); tally.mean("kl", torch.empty(0))
    >>> tally.metrics()
    {'kl': 1.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._maxima: dict[str, float] = {}

    def mean(self, name: str, values: torch.Tensor) -> None:
        """Add values whose mean over all of them is the metric."""
        if values.numel():
            total, count = self._sums.get(name, (0.0, 0))
            total += float(values.double().sum())
            self._sums[name] = (total, count + values.numel())

    def maximum(self, name: str, values: torch.Tensor) -> None:
        """Add values whose maximum is the metric."""
        if values.numel():
            self._maxima[name] = max(float(values.max()), self._maxima.get(name, -torch.inf))

    def metrics(self) -> Mapping[str, float]:
        """Every metric that had a value."""
        means = {name: total / count for name, (total, count) in self._sums.items()}
        return means | self._maxima
