"""A micro-batch as tensors, and the one forward pass every loss is computed from.

Not a loss and not a packer. The one thing that must stay true: policy, frozen reference and anchor
see a row through this same pass.

Legend of suffixes: _T input tokens, _U positions with logits, _N trained tokens, _V vocabulary,
_C hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from posttrain.engine.decoder import Attend
from posttrain.train.attention import PackedAttention
from posttrain.train.losses import Tokens
from posttrain.train.pack import MicroBatch


class Model(Protocol):
    """What training needs of a model; `engine.model` loads them."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of every parameter."""
        ...

    def hidden(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Final hidden states (T, C), last norm applied."""
        ...

    def logits(self, hidden_NC: torch.Tensor) -> torch.Tensor:
        """Logits (N, V) in the model's own type."""
        ...

    def named_parameters(self) -> Any:
        """Names and parameters."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of a micro-batch."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    attend: PackedAttention
    places_U: torch.Tensor
    """Input positions whose logits are needed, ascending."""
    rows_N: torch.Tensor
    """Index into `places_U` for each trained token, ascending."""
    targets_N: torch.Tensor
    tokens: Tokens

    @staticmethod
    def of(
        micro: MicroBatch,
        *,
        dtype: torch.dtype,
        version: int | None = None,
        device: torch.device | None = None,
    ) -> Batch:
        """Tensors of a micro-batch; `dtype` is that of the loss (float32 or float64), `version`
        that of the weights it is computed with.
        """

        def column(name: str, kind: torch.dtype) -> torch.Tensor:
            return torch.tensor(
                [getattr(t, name) for t in micro.targets], dtype=kind, device=device
            )

        places_U, rows_N = torch.unique_consecutive(
            column("place", torch.long), return_inverse=True
        )
        return Batch(
            torch.tensor(micro.ids_T, device=device),
            torch.tensor(micro.positions_T, device=device),
            PackedAttention(micro.trees, device=device),
            places_U,
            rows_N,
            column("id", torch.long),
            Tokens(
                behaviour_N=column("behaviour", dtype),
                advantage_N=column("advantage", dtype),
                weight_N=column("weight", dtype),
                fresh_N=torch.tensor([t.version == version for t in micro.targets], device=device),
                row_N=column("sequence", torch.long),
                num_rows=micro.num_rows,
            ),
        )

    def logits(self, model: Model) -> torch.Tensor:
        """Logits (U, V) at the predicting positions, and nowhere else."""
        hidden_TC = model.hidden(self.ids_T, self.positions_T, self.attend)
        return model.logits(hidden_TC.index_select(0, self.places_U))
