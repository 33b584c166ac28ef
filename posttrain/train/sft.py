"""Supervised fine-tuning: imitate the masked tokens of examples.

Not a data loader. The one thing that must stay true: what is trained is what the mask says, never
what a comparison with the padding id says (BR-13).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.core.ports import Example
from posttrain.train.algorithms import Normaliser
from posttrain.train.batch import Batch, Model
from posttrain.train.logprobs import selected_logprobs
from posttrain.train.losses import supervised_loss
from posttrain.train.objective import Plan
from posttrain.train.pack import from_examples, normalised
from posttrain.train.tally import Tally


class SupervisedObjective:
    """Weighted mean of the negative log-probability over all trained tokens of the batch."""

    def plan(self, examples: Sequence[Example]) -> Plan:
        """Rows of the examples that have something to imitate."""
        rows = normalised(from_examples(examples), Normaliser.TOKEN_MEAN)
        reason = "no example has a token to imitate" if not rows else None
        return Plan(trainables=rows, skipped=reason)

    def loss(self, model: Model, batch: Batch, tally: Tally) -> torch.Tensor:
        """Loss of a micro-batch."""
        scored = selected_logprobs(batch.logits(model), batch.rows_N, batch.targets_N)
        tally.mean("entropy", scored.entropy_U[batch.rows_N])
        return supervised_loss(scored.logprobs_N, batch.tokens)
