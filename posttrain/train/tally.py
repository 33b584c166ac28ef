"""Metrics as sums and counts, so that a mean over parts is the mean over their tokens (BR-04).

Not a log. The one thing that must stay true: a metric without a single valid token is absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


class Tally:
    """Collects metrics over the micro-batches of a step.

    >>> first, second = Tally(), Tally()
    >>> first.mean("kl", torch.ones(10)); second.mean("kl", torch.empty(0))
    >>> Tally.merged([first, second]).metrics()
    {'kl': 1.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._maxima: dict[str, float] = {}

    def mean(self, name: str, values: torch.Tensor) -> None:
        """Add values whose mean over all of them is the metric."""
        if values.numel():
            self.add(name, float(values.double().sum()), values.numel())

    def add(self, name: str, total: float, count: int) -> None:
        """Add a sum over `count` values."""
        before, number = self._sums.get(name, (0.0, 0))
        self._sums[name] = (before + total, number + count)

    def maximum(self, name: str, values: torch.Tensor) -> None:
        """Add values whose maximum is the metric."""
        if values.numel():
            self._maxima[name] = max(float(values.max()), self._maxima.get(name, -torch.inf))

    def metrics(self) -> Mapping[str, float]:
        """Every metric that had a value."""
        means = {name: total / count for name, (total, count) in self._sums.items() if count}
        return means | self._maxima

    @staticmethod
    def merged(tallies: Iterable[Tally]) -> Tally:
        """The tally of all parts together, whatever their sizes."""
        whole = Tally()
        for part in tallies:
            for name, (total, count) in part._sums.items():
                whole.add(name, total, count)
            for name, value in part._maxima.items():
                whole._maxima[name] = max(value, whole._maxima.get(name, -torch.inf))
        return whole
