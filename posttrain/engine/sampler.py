"""Drawing tokens: counter-based random numbers, temperature, top-k, top-p, log-probabilities.

The number that decides a token is a hash of its request's seed and its position, so a token
depends on its own request alone: not on neighbours, arrival, preemption or chunking. The one
thing that must stay true: the log-probability returned is that of the distribution the token was
drawn from (for greedy requests: of the distribution at temperature 1).

Legend of suffixes: _B requests of a batch, _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from posttrain.core.errors import EngineError
from posttrain.core.trajectory import Sampling
from posttrain.engine.batcher import Draw


@dataclass(frozen=True, slots=True)
class Ask:
    """One token to draw: how, and at which position of its sequence it will stand."""

    sampling: Sampling
    position: int


def draw(logits_BV: torch.Tensor, asks: Sequence[Ask]) -> list[Draw]:
    """Draw one token a row. Works in float32, or in float64 where the logits are.

    Raises:
        EngineError: a row has no finite distribution (NaN or infinite logits).
    """
    kind = torch.float64 if logits_BV.dtype is torch.float64 else torch.float32
    p_BV = _processed(logits_BV, [ask.sampling for ask in asks]).softmax(-1, dtype=kind)
    uniform_B = uniforms([ask.sampling.seed for ask in asks], [ask.position for ask in asks])
    token_B1 = _inverse(p_BV, torch.from_numpy(uniform_B).to(p_BV)[:, None])
    greedy = [index for index, ask in enumerate(asks) if ask.sampling.temperature == 0]
    if greedy:
        token_B1[greedy] = p_BV[greedy].argmax(-1, keepdim=True)
    logprob_B1 = p_BV.gather(-1, token_B1).log()
    return [
        Draw(token, logprob)
        for token, logprob in zip(token_B1[:, 0].tolist(), logprob_B1[:, 0].tolist(), strict=True)
    ]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Numbers in [0, 1) with 24 bits (exact in float32), one for each (seed, position).

    The mixer is SplitMix64's (Steele, Lea, Flood 2014, figure 18), applied to the seed and then to
    the sum with the position.
    """
    state = _mix(np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64))
    hashed = _mix(state + np.array(positions, dtype=np.uint64) * _GOLDEN)
    return (hashed >> np.uint64(40)).astype(np.float64) * 2.0**-24


def _inverse(p_BV: torch.Tensor, uniform_B1: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution, (B, 1), in two levels: which run of `_RUN` tokens,
    then which of its tokens. (A running sum over the whole vocabulary is the slow way.)

    A mark always lies strictly below the total it is sought in, so that the search ends on a token
    of non-zero probability.
    """
    vocab = p_BV.shape[-1]
    runs_BRN = functional.pad(p_BV, (0, -vocab % _RUN)).view(len(p_BV), -1, _RUN)
    ends_BR = runs_BRN.sum(-1).cumsum(-1)
    if not bool(torch.isfinite(ends_BR[:, -1]).all()):
        raise EngineError("the model's logits are not finite.", "look at the last weight update")
    mark_B1 = _below(uniform_B1 * ends_BR[:, -1:], ends_BR[:, -1:])
    run_B1 = torch.searchsorted(ends_BR, mark_B1, right=True)
    starts_BR = functional.pad(ends_BR, (1, 0))
    within_BN = runs_BRN[torch.arange(len(p_BV)), run_B1[:, 0]].cumsum(-1)
    rest_B1 = _below(mark_B1 - starts_BR.gather(-1, run_B1), within_BN[:, -1:])
    return run_B1 * _RUN + torch.searchsorted(within_BN, rest_B1, right=True)


def _below(mark_B1: torch.Tensor, total_B1: torch.Tensor) -> torch.Tensor:
    return torch.minimum(mark_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))


_RUN = 128
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _processed(z_BV: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Logits after temperature, then top-k, then top-p over what top-k left; untouched (in their
    own type) where no request asks for any of them.
    """
    scales = [s.temperature or 1.0 for s in samplings]
    cut = [i for i, s in enumerate(samplings) if s.top_k > 0 or s.top_p < 1.0]
    if not cut and all(scale == 1.0 for scale in scales):
        return z_BV
    kind = torch.float64 if z_BV.dtype is torch.float64 else torch.float32
    z_BV = z_BV.to(kind, copy=True)
    z_BV /= torch.tensor(scales, dtype=kind, device=z_BV.device)[:, None]
    for index in cut:
        z_BV[index] = _truncated(z_BV[index], samplings[index])
    return z_BV


def _truncated(z_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Keep the `top_k` largest, and of these the smallest set whose probability reaches `top_p`
    (arXiv 1904.09751, section 3.1); everything else becomes minus infinity. Among equal logits the
    smaller id is kept first; at least one token stays.
    """
    sorted_V, order_V = z_V.sort(descending=True, stable=True)
    keep_V = torch.ones_like(sorted_V, dtype=torch.bool)
    if sampling.top_k > 0:
        keep_V[sampling.top_k :] = False
    if sampling.top_p < 1.0:
        p_V = sorted_V.masked_fill(~keep_V, -torch.inf).softmax(-1)
        keep_V &= (p_V.cumsum(-1) - p_V) < sampling.top_p
        keep_V[0] = True
    kept = order_V[keep_V]
    return torch.full_like(z_V, -torch.inf).index_copy_(0, kept, z_V[kept])
