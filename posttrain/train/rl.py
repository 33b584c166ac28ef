"""Reinforcement: groups of judged attempts to the loss of an algorithm.

Not a loop: one call, one batch, trained on once. The one thing that must stay true: an attempt
without a reward has no part in a baseline, a normaliser or a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from posttrain.core.errors import ConfigError
from posttrain.core.trajectory import Group
from posttrain.core.verdict import StopReason
from posttrain.train.advantages import Advantages, advantages
from posttrain.train.algorithms import algorithm
from posttrain.train.batch import Batch, Model
from posttrain.train.logprobs import selected_logprobs
from posttrain.train.losses import policy_loss, reference_loss
from posttrain.train.objective import Plan
from posttrain.train.pack import from_groups, normalised
from posttrain.train.settings import TrainSettings
from posttrain.train.tally import Tally

TRUNCATED = frozenset({StopReason.TOKEN_LIMIT, StopReason.CONTEXT_LIMIT})


class PolicyObjective:
    """The policy loss of the settings' algorithm, with KL to `reference` where it has a weight.

    Raises:
        ConfigError: the algorithm is unknown, or a KL is asked for without a reference.
    """

    def __init__(
        self, settings: TrainSettings, *, reference: Model | None, temperature: float
    ) -> None:
        self._settings = settings
        self._algorithm = algorithm(settings.algorithm)
        chosen = settings.kl_weight
        self._kl_weight = self._algorithm.kl_weight if chosen is None else chosen
        self._temperature = temperature
        if self._kl_weight and reference is None:
            raise ConfigError(
                f"algorithm {settings.algorithm!r} with kl_weight {self._kl_weight} needs the "
                "starting weights as reference, and there are none.",
                "set train.kl_weight = 0 or give the trainer a reference",
            )
        self._reference = reference

    def plan(self, groups: Sequence[Group]) -> Plan:
        """Rows of the members with an advantage; flat groups count but have no backward pass."""
        rule = self._algorithm
        judged = [
            advantages(group.rewards, baseline=rule.baseline, divide=rule.divide)
            for group in groups
        ]
        if self._settings.mask_truncated:
            judged = [_untruncated(g, a) for g, a in zip(groups, judged, strict=True)]
        rows = normalised(
            from_groups(groups, judged, keep_flat=self._kl_weight > 0),
            rule.normaliser,
            constant_length=self._settings.constant_length,
        )
        reason = None
        if not rows:
            reason = "no attempt has both a reward and a token to train on"
        elif all(row.silent for row in rows):
            reason = "no group has two different rewards"
        flat = {"flat_groups": sum(a.flat for a in judged) / len(judged)} if judged else {}
        return Plan(trainables=rows, skipped=reason, metrics=flat)

    def loss(self, model: Model, batch: Batch, tally: Tally) -> torch.Tensor:
        """Loss of a micro-batch."""
        logprobs_N, entropy_U = selected_logprobs(
            batch.logits(model), batch.rows_N, batch.targets_N, temperature=self._temperature
        )
        tally.mean("entropy", entropy_U[batch.rows_N])
        loss = policy_loss(
            logprobs_N,
            batch.tokens,
            self._algorithm,
            tally,
            importance_cap=self._settings.importance_cap,
        )
        if not self._kl_weight:
            return loss
        assert self._reference is not None, "checked when the objective was made"
        with torch.no_grad():
            reference_N = selected_logprobs(
                batch.logits(self._reference),
                batch.rows_N,
                batch.targets_N,
                temperature=self._temperature,
            ).logprobs_N
        kl = reference_loss(logprobs_N, reference_N, batch.tokens, tally)
        return loss + self._kl_weight * kl


def _untruncated(group: Group, judged: Advantages) -> Advantages:
    """Advantages without those of attempts that were cut at a token limit."""
    return replace(
        judged,
        values=tuple(
            None if member.stop in TRUNCATED else value
            for member, value in zip(group.members, judged.values, strict=True)
        ),
    )
