"""A decoder whose matrix products run over packed copies of its weights.

oneDNN brings a matrix into its own block order at every call; for the few rows of a decoding step
that is a third to a half of the product's time. Packed once, the products give the same bits in
less. The copies are a cache: nothing trains on them. The one thing that must stay true: `refresh`
is called after every change of the weights and before the next pass.
"""

from __future__ import annotations

import torch
from torch import nn

from posttrain.engine.decoder import Decoder

MATRICES = ("qkv", "out", "gate_up", "down")


class PackedDecoder(Decoder):
    """A skeleton over another decoder's storage, with packed matrices beside it."""

    def __init__(self, source: Decoder) -> None:
        tensors = {
            name.removeprefix("layers."): parameter.detach()
            for name, parameter in source.named_parameters()
        }
        super().__init__(
            config=source.config, shape=source.shape, rotary=source.rotary, tensors=tensors
        )
        self._packed: dict[tuple[int, str], torch.Tensor] = {}
        self.refresh()

    @staticmethod
    def suits(decoder: object) -> bool:
        """True where this machine and this model gain by it."""
        return (
            isinstance(decoder, Decoder)
            and decoder.dtype is torch.bfloat16
            and decoder.embed.device.type == "cpu"
            and torch.backends.mkldnn.is_available()
            and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Pack the weights as they are now (0.1 s for 135 M parameters on one core)."""
        self._packed.clear()  # first, so that the new ones find their room
        matrices = [(layer, name) for layer in self.layers for name in MATRICES]
        matrices.append((self, "embed" if self.tied else "head"))
        for owner, name in matrices:
            weight = getattr(owner, name).detach()
            self._packed[id(owner), name] = torch.ops.mkldnn._reorder_linear_weight(weight)

    def product(self, x_NC: torch.Tensor, owner: nn.Module, name: str) -> torch.Tensor:
        """As `Decoder.product`, without gradients."""
        bias = getattr(owner, f"{name}_bias", None)
        return torch.ops.mkldnn._linear_pointwise(
            x_NC, self._packed[id(owner), name], bias, "none", [], ""
        )
