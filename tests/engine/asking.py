"""Shorthands of the engine tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from posttrain.core.ports import SampleRequest, Work
from posttrain.core.task import Lane
from posttrain.core.trajectory import Sampled, Sampling
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.model import full_attention
from posttrain.engine.settings import EngineSettings


class UpdatesFirst:
    """A device policy: update before train before engine."""

    def choose(self, ready: frozenset[Work]) -> Work:
        return max(ready)


def ask(
    ids: Sequence[int],
    *,
    slot: str = "train",
    lane: Lane = Lane.TRAIN,
    max_tokens: int = 8,
    **sampling: Any,
) -> SampleRequest:
    chosen = Sampling(max_tokens=max_tokens, **sampling)
    return SampleRequest(ids=tuple(ids), sampling=chosen, slot=slot, lane=lane)


def engine(model: Any, **settings: Any) -> EmbeddedEngine:
    options = {name: settings.pop(name) for name in ("to_bytes", "policy", "version", "idle_cause",
               "clock") if name in settings}  # fmt: skip
    chosen = EngineSettings(**{"cache_tokens": 2048, **settings})
    return EmbeddedEngine(model, settings=chosen, **{"policy": UpdatesFirst(), **options})


def sample_all(model: Any, requests: Sequence[SampleRequest], **settings: Any) -> list[Sampled]:
    async def body() -> list[Sampled]:
        with engine(model, **settings) as running:
            return await asyncio.gather(*[running.sample(request) for request in requests])

    return asyncio.run(body())


@torch.no_grad()
def logits_by_full_pass(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position, without any cache."""
    positions = torch.arange(len(ids))
    hidden = model.hidden(torch.tensor(list(ids)), positions, full_attention(positions))
    return model.logits(hidden)


def worst_difference(model: Any, request: SampleRequest, sampled: Sampled) -> float:
    """Largest difference between the engine's log-probabilities and those of a full pass."""
    first = len(request.ids)
    ids = (*request.ids, *sampled.ids)
    logits = logits_by_full_pass(model, ids) / (request.sampling.temperature or 1.0)
    expected = logits.log_softmax(-1)[range(first - 1, len(ids) - 1), list(sampled.ids)]
    return float((expected - torch.tensor(sampled.logprobs, dtype=expected.dtype)).abs().max())
