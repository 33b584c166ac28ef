"""Log-probabilities of trained tokens and their entropy, from logits in the model's own type.

Not a loss. The logits of a micro-batch's predicting positions are kept once, in the model's type;
everything wider lives only a few rows at a time, forward and backward. The one thing that must
stay true: arithmetic is float32 (float64 for float64 logits) and the sampling temperature is
applied to the logits, exactly as the engine does it.

Legend of suffixes: _U positions with logits, _N trained tokens, _V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

CHUNK_ROWS = 64
"""Rows of logits that are widened at a time: 12 MiB for a vocabulary of 49,152."""


class Scored(NamedTuple):
    """What a forward pass says about the trained tokens."""

    logprobs_N: torch.Tensor
    """Natural log-probabilities, float32 or wider, with gradient."""
    entropy_U: torch.Tensor
    """Entropy in nats of the distribution at each position, without gradient."""


def selected_logprobs(
    logits_UV: torch.Tensor,
    rows_N: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
) -> Scored:
    """Log-probability of token `targets_N[n]` at position `rows_N[n]`. `rows_N` ascends."""
    assert temperature > 0, f"a temperature above 0 is needed to train, got {temperature}"
    return Scored(*_Selected.apply(logits_UV, rows_N, targets_N, 1.0 / temperature))


def wide(x: torch.Tensor) -> torch.Tensor:
    """The tensor in float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_UV: torch.Tensor,
        rows_N: torch.Tensor,
        targets_N: torch.Tensor,
        sharpness: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norms, entropies = [], []
        for chunk in logits_UV.split(CHUNK_ROWS):
            scores = wide(chunk) * sharpness
            norm = scores.logsumexp(-1)
            probs = (scores - norm[:, None]).exp_()
            entropies.append(norm - probs.mul_(scores).sum(-1))
            norms.append(norm)
        norm_U = torch.cat(norms)
        logprobs_N = wide(logits_UV[rows_N, targets_N]) * sharpness - norm_U[rows_N]
        ctx.save_for_backward(logits_UV, norm_U, rows_N, targets_N)
        ctx.sharpness = sharpness
        entropy_U = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_U)
        return logprobs_N, entropy_U

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits_UV, norm_U, rows_N, targets_N = ctx.saved_tensors
        grad_N = grads[0] * ctx.sharpness
        total_U = torch.zeros_like(norm_U).index_add_(0, rows_N, grad_N)
        grad_UV = torch.empty_like(logits_UV)
        vocabulary = logits_UV.shape[1]
        bounds = torch.arange(0, len(norm_U) + CHUNK_ROWS, CHUNK_ROWS, device=rows_N.device)
        cuts = torch.searchsorted(rows_N, bounds).tolist()
        for index, chunk in enumerate(logits_UV.split(CHUNK_ROWS)):
            rows = slice(index * CHUNK_ROWS, index * CHUNK_ROWS + len(chunk))
            mine = slice(cuts[index], cuts[index + 1])
            probs = (wide(chunk) * ctx.sharpness).sub_(norm_U[rows, None]).exp_()
            probs.mul_(-total_U[rows, None])
            flat = (rows_N[mine] - rows.start) * vocabulary + targets_N[mine]
            probs.view(-1).index_add_(0, flat, grad_N[mine])
            grad_UV[rows] = probs
        return grad_UV, None, None, None
