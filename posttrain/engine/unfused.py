"""The unmodified transformers model behind the interface of `Decoder`, for any architecture.

Attention goes through transformers' public attention interface to the same `attend`. It is slower
than the fused pass and otherwise equal to it. The one thing that must stay true: nothing of the
model but its attention function is replaced.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from posttrain.core.errors import EngineError
from posttrain.engine.decoder import Attend, Shape, write_pretrained

INTERFACE = "posttrain"
_current: ContextVar[Attend] = ContextVar("attend")


class UnfusedDecoder(nn.Module):
    """A transformers causal model; same methods as `Decoder`."""

    rewrite = "unmodified"

    def __init__(self, model: Any, *, shape: Shape) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        model.set_attn_implementation(INTERFACE)
        model.requires_grad_(False).eval()
        self.shape = self._observed(shape)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return self.model.dtype

    def hidden(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Final hidden states (T, C)."""
        token = _current.set(attend)
        try:
            output = self.model.base_model(
                input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False
            )
        finally:
            _current.reset(token)
        return output.last_hidden_state[0]

    def logits(self, hidden_NC: torch.Tensor) -> torch.Tensor:
        """Logits (N, V)."""
        return self.model.get_output_embeddings()(hidden_NC)

    def named_views(self) -> dict[str, torch.Tensor]:
        """Transformers' parameter name → the parameter itself, detached; no tied head."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def save_pretrained(self, directory: Path | str) -> None:
        """Write config and weights so that transformers (and `load`) can read them."""
        write_pretrained(self, Path(directory))

    @torch.no_grad()
    def _observed(self, shape: Shape) -> Shape:
        """The shape with layers and heads as attention sees them: configurations name them
        differently, or name what the model does not use.
        """
        seen: list[tuple[int, ...]] = []

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            seen.append((q.shape[1], k.shape[1], k.shape[2], v.shape[2]))
            return q.new_zeros(len(q), q.shape[1], v.shape[2])

        self.hidden(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), attend)
        if len(set(seen)) != 1:
            raise EngineError(
                f"the attention layers of this model differ from one another: {sorted(set(seen))}.",
                "use a model whose layers are all alike",
            )
        heads, kv_heads, head_dim, value_dim = seen[0]
        return replace(
            shape, layers=len(seen), heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            value_dim=value_dim,
        )  # fmt: skip

    def skeleton(self) -> UnfusedDecoder:
        """A second module over the same storage, without gradients."""
        shared = {
            id(parameter): nn.Parameter(parameter.detach(), requires_grad=False)
            for parameter in self.model.parameters()
        }
        return UnfusedDecoder(copy.deepcopy(self.model, shared), shape=self.shape)

    def copy(self) -> UnfusedDecoder:
        """A module with storage of its own."""
        return UnfusedDecoder(copy.deepcopy(self.model), shape=self.shape)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention signature: (1, heads, T, D) in, (1, T, heads, D) out."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise EngineError(f"the model's attention uses '{name}', which the engine cannot do.")
    default = query.shape[-1] ** -0.5
    if scaling is not None and abs(scaling - default) > 1e-12:
        query = query * (scaling / default)
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    return _current.get()(module.layer_idx, q_THD, k_TKD, v_TKD)[None], None


AttentionInterface.register(INTERFACE, _attention)
