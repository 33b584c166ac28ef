"""What a step minimises: the rows it trains on and the loss of one micro-batch.

`rl.PolicyObjective` and `sft.SupervisedObjective` are the two; the trainer drives either. The one
thing that must stay true: a plan without a row to train on says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from posttrain.train.batch import Batch, Model
from posttrain.train.pack import Trainable, trained_indices
from posttrain.train.tally import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Rows of one step, normalised over the whole batch."""

    trainables: Sequence[Trainable]
    version: int | None = None
    """Policy version of the weights it starts from; None where nothing was sampled."""
    skipped: str | None = None
    """Why there is nothing to train on; None where there is."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens that count in the loss, those without a gradient included."""
        return sum(len(trained_indices(trainable.row)) for trainable in self.trainables)

    @property
    def num_sequences(self) -> int:
        """Attempts or examples that count in the loss."""
        return len({trainable.sequence for trainable in self.trainables})


class Objective(Protocol):
    """The loss of one micro-batch."""

    def loss(self, model: Model, batch: Batch, tally: Tally) -> torch.Tensor:
        """A scalar with gradient; micro-batches add up to the loss of the step."""
        ...
