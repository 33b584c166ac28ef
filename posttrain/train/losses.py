"""One policy loss, of which the algorithms are values; the KL estimate; the supervised loss.

Not a normaliser: every token comes with a weight in which the whole batch's normaliser is already
worked in (`pack.normalised`), so a micro-batch's loss is a plain weighted sum and micro-batches add
up. The one thing that must stay true: tokens that are not trained are not here at all, so nothing
about them can reach a loss or a gradient.

Legend of suffixes: _N trained tokens of a micro-batch; rows are numbered within it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from posttrain.train.algorithms import Algorithm, Level, Surrogate
from posttrain.train.logprobs import wide
from posttrain.train.tally import Tally

K3_TANGENT = 10.0
"""Above this difference k3 goes on along its tangent, so that value and gradient stay finite."""
LOG_RATIO_LIMIT = 20.0
"""A log-ratio is cut here before its exponential; the uncut maximum is in the metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a loss needs to know of each trained token beside its log-probability now."""

    behaviour_N: torch.Tensor
    """Log-probability it was sampled with."""
    advantage_N: torch.Tensor
    weight_N: torch.Tensor
    """Its share in the batch's loss."""
    fresh_N: torch.Tensor
    """Whether it was sampled by the very weights it is trained from."""
    row_N: torch.Tensor
    """Row it belongs to, 0 … num_rows - 1."""
    num_rows: int


def policy_loss(
    logprobs_N: torch.Tensor,
    tokens: Tokens,
    algorithm: Algorithm,
    tally: Tally,
    *,
    importance_cap: float | None = None,
) -> torch.Tensor:
    """Weighted sum of the surrogate over the trained tokens, a scalar.

    The ratio is that of the policy now and the behaviour's recorded log-probabilities. With
    `importance_cap` C the roles are split (truncated importance sampling, "Your efficient RL
    framework secretly brings you off-policy RL training", 2025): the ratio is taken to the policy
    at the start of the step, which it equals in value, and each token is weighted by
    min(exp(policy - behaviour), C) without gradient.
    """
    drift_N = logprobs_N - tokens.behaviour_N
    start_N = logprobs_N.detach() if importance_cap is not None else tokens.behaviour_N
    log_ratio_N = levelled(logprobs_N - start_N, tokens, algorithm.level)
    ratio_N = log_ratio_N.clamp(max=LOG_RATIO_LIMIT).exp()
    low = None if algorithm.clip_low is None else 1.0 - algorithm.clip_low
    high = None if algorithm.clip_high is None else 1.0 + algorithm.clip_high
    clipped_N = ratio_N if low is None and high is None else ratio_N.clamp(min=low, max=high)
    if algorithm.surrogate is Surrogate.CLIP:
        whole_N, held_N = ratio_N * tokens.advantage_N, clipped_N * tokens.advantage_N
        gain_N, cut_N = torch.minimum(whole_N, held_N), held_N < whole_N
    else:
        gain_N = clipped_N.detach() * tokens.advantage_N * logprobs_N
        cut_N = clipped_N != ratio_N
    if importance_cap is not None:
        gain_N = gain_N * drift_N.detach().clamp(max=math.log(importance_cap)).exp()
    with torch.no_grad():
        for name, chosen_N in (("logprob_gap", tokens.fresh_N), ("policy_drift", ~tokens.fresh_N)):
            tally.mean(f"{name}_mean", drift_N[chosen_N].abs())
            tally.maximum(f"{name}_max", drift_N[chosen_N].abs())
        tally.mean("clip_fraction", cut_N)
        tally.maximum("ratio_max", log_ratio_N.double().clamp(max=700.0).exp())
    return -(tokens.weight_N * gain_N).sum()


def levelled(difference_N: torch.Tensor, tokens: Tokens, level: Level) -> torch.Tensor:
    """Log-ratio of each token: its own difference, or its row's sum or mean of differences."""
    if level is Level.TOKEN:
        return difference_N
    zeros = difference_N.new_zeros(tokens.num_rows)
    total = zeros.index_add(0, tokens.row_N, difference_N)
    if level is Level.GEOMETRIC:
        ones_N = torch.ones_like(difference_N)
        total = total / zeros.index_add(0, tokens.row_N, ones_N).clamp(min=1.0)
    return total[tokens.row_N]


def k3(difference: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 of d = reference - policy log-probability, float32 or wider.

    Unbiased for KL(policy ‖ reference) under the policy and never negative (Schulman,
    "Approximating KL divergence", 2020). Above `K3_TANGENT` it continues along its tangent.

    >>> [round(x, 5) for x in k3(torch.tensor([0.0, 0.5, -0.5, 2.0])).tolist()]
    [0.0, 0.14872, 0.10653, 4.38906]
    """
    d = wide(difference)
    near = d.clamp(max=K3_TANGENT)
    return (near.expm1() - near).clamp(min=0.0) + math.expm1(K3_TANGENT) * (d - near)


def reference_loss(
    logprobs_N: torch.Tensor, reference_N: torch.Tensor, tokens: Tokens, tally: Tally
) -> torch.Tensor:
    """Weighted sum of k3 over the trained tokens (DeepSeekMath, arXiv 2402.03300, equation 4)."""
    estimate_N = k3(reference_N - logprobs_N)
    tally.mean("kl", estimate_N.detach())
    return (tokens.weight_N * estimate_N).sum()


def supervised_loss(logprobs_N: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Weighted sum of negative log-probabilities."""
    return -(tokens.weight_N * logprobs_N).sum()
