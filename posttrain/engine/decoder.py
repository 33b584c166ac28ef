"""The fused forward pass that engine and trainer share, for models built like Llama.

Covers Llama, SmolLM2, Mistral (full attention), Qwen2 (biases on q, k, v) and Qwen3 (norms on q
and k): one matrix for q, k, v, one for gate and up. It is not a loader (`engine.model`) and holds
no keys or values: attention is whatever `attend` it is handed. The one thing that must stay true:
`named_views` are views of the very storage the forward pass reads, under transformers' names.

Legend of suffixes: _T tokens (flat, packed, no batch dimension), _N any number of rows, _C hidden
width, _H query heads, _K key-value heads, _D head width, _V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from posttrain.core.errors import CheckpointError

_COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "generation_config.json",
)  # fmt: skip
"""Files that make a directory of weights a model that others can use."""


class Attend(Protocol):
    """Attention over whatever context the caller keeps; called once a layer, in layer order."""

    def __call__(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, /
    ) -> torch.Tensor:
        """Outputs of shape (T, H, D). `q` and `k` are rotated already; scores are scaled by
        D ** -0.5 (a model that wants another scale gets a `q` that makes up for it).
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What an engine must know about a model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    """Width of a value head; equal to `head_dim` in every model that `Decoder` covers."""
    hidden: int
    vocab: int
    max_context: int
    """Longest context in tokens for which full attention is what the model means."""


class Layer(nn.Module):
    """Parameters of one block. Rows of `qkv`: H·D of q, K·D of k, K·D of v; of `gate_up`: gate,
    then up. Biases and the norms on q and k are None where the model has none.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name in LAYER_TENSORS:
            tensor = tensors.get(name)
            parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, parameter)


LAYER_TENSORS = ("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias",
                 "mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias")  # fmt: skip


class Decoder(nn.Module):
    """The fused model. Built by `engine.model.load`, `skeleton` or `copy`.

    Parameters are made without gradients; the trainer switches them on with `requires_grad_`.
    """

    rewrite = "fused"
    """How the forward pass relates to transformers' own: `fused` or `unmodified`."""

    def __init__(
        self, *, config: Any, shape: Shape, rotary: Rotary, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.config, self.shape, self.rotary = config, shape, rotary
        self.eps = float(config.rms_norm_eps)
        self.tied = "head" not in tensors
        self.embed = nn.Parameter(tensors["embed"], requires_grad=False)
        self.norm = nn.Parameter(tensors["norm"], requires_grad=False)
        if not self.tied:
            self.head = nn.Parameter(tensors["head"], requires_grad=False)
        self.layers = nn.ModuleList(
            Layer(
                {name: tensors[key] for name in LAYER_TENSORS if (key := f"{i}.{name}") in tensors}
            )
            for i in range(shape.layers)
        )

    @property
    def dtype(self) -> torch.dtype:
        """Type of every parameter."""
        return self.embed.dtype

    def hidden(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Final hidden states (T, C), the last norm applied. `positions_T` may be in any order;
        which tokens see which is the business of `attend` alone.
        """
        x_TC = widened(_Lookup.apply(self.embed, ids_T))
        cos_T1D, sin_T1D = self.rotary.table(positions_T, self.dtype)
        for index, layer in enumerate(self.layers):
            x_TC = self.block(index, layer, x_TC, (cos_T1D, sin_T1D), attend)
        return rms_norm(x_TC, self.norm, self.eps)

    def logits(self, hidden_NC: torch.Tensor) -> torch.Tensor:
        """Logits (N, V) in the model's own type."""
        return self.product(hidden_NC, self, "embed" if self.tied else "head")

    def product(self, x_NC: torch.Tensor, owner: nn.Module, name: str) -> torch.Tensor:
        """`x` times the owner's matrix of that name, plus its bias if it has one."""
        if owner is self:
            return _Logits.apply(x_NC, getattr(owner, name))
        return functional.linear(x_NC, getattr(owner, name), getattr(owner, f"{name}_bias", None))

    def block(
        self,
        index: int,
        layer: Layer,
        x_TC: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        """One transformer block; a unit for activation checkpointing."""
        shape, num_tokens = self.shape, x_TC.shape[0]
        turned = shape.heads + shape.kv_heads
        qkv = self.product(rms_norm(x_TC, layer.input_norm, self.eps), layer, "qkv").view(
            num_tokens, turned + shape.kv_heads, shape.head_dim
        )
        if layer.q_norm is None:
            qk = rotate(qkv[:, :turned], *turn)
            q, k = qk[:, : shape.heads], qk[:, shape.heads :]
        else:
            q = rotate(rms_norm(qkv[:, : shape.heads], layer.q_norm, self.eps), *turn)
            k = rotate(rms_norm(qkv[:, shape.heads : turned], layer.k_norm, self.eps), *turn)
        seen_THD = attend(index, q, k, qkv[:, turned:])
        x_TC = x_TC + self.product(seen_THD.flatten(1), layer, "out")
        gate_up = self.product(rms_norm(x_TC, layer.mlp_norm, self.eps), layer, "gate_up")
        gate, up = gate_up.chunk(2, dim=-1)
        return x_TC + self.product(functional.silu(gate) * up, layer, "down")

    def named_views(self) -> dict[str, torch.Tensor]:
        """Transformers' parameter name → a detached view of the fused storage. Writing into a
        view in place changes the model. A tied head is not listed.
        """
        views = {"model.embed_tokens.weight": self.embed.detach(),
                 "model.norm.weight": self.norm.detach()}  # fmt: skip
        if not self.tied:
            views["lm_head.weight"] = self.head.detach()
        rows = row_ranges(self.shape, self.config.intermediate_size)
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                suffix = "bias" if name.endswith("_bias") else "weight"
                for part, first, last in rows[name.removesuffix("_bias")]:
                    views[f"model.layers.{index}.{part}.{suffix}"] = parameter.detach()[first:last]
        return views

    def save_pretrained(self, directory: Path | str) -> None:
        """Write config and weights so that transformers (and `load`) can read them."""
        write_pretrained(self, Path(directory))

    def skeleton(self) -> Decoder:
        """A second module over the same storage, without gradients. It sees every in-place change
        of the first, at once and without a copy.
        """
        return self._over({name: tensor.detach() for name, tensor in self.named_parameters()})

    def copy(self) -> Decoder:
        """A module with storage of its own: equal now, independent afterwards."""
        return self._over({name: p.detach().clone() for name, p in self.named_parameters()})

    def _over(self, tensors: Mapping[str, torch.Tensor]) -> Decoder:
        names = {name.removeprefix("layers."): tensor for name, tensor in tensors.items()}
        return Decoder(config=self.config, shape=self.shape, rotary=self.rotary, tensors=names)


# The gradient of an embedding is as large as the embedding, for a lookup as for logits: new memory
# at every pass, which costs more than the arithmetic. A parameter with an attribute `gradient_sink`
# is given it by rows instead: a function of (rows, values).


class _Lookup(torch.autograd.Function):
    """Rows of an embedding. Torch's own gradient sums a token's in bfloat16, which makes a frequent
    token's wrong by whole per cents; this one is summed in float32.
    """

    @staticmethod
    def forward(ctx: Any, embed_VC: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(embed_VC, ids_T)
        return embed_VC.index_select(0, ids_T)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        embed_VC, ids_T = ctx.saved_tensors
        wide_TC = widened(grads[0])
        if (sink := getattr(embed_VC, "gradient_sink", None)) is not None:
            return sink(ids_T, wide_TC), None
        sums_VC = wide_TC.new_zeros(embed_VC.shape).index_add_(0, ids_T, wide_TC)
        return sums_VC.to(embed_VC.dtype), None


class _Logits(torch.autograd.Function):
    """Hidden states times an embedding."""

    @staticmethod
    def forward(ctx: Any, hidden_NC: torch.Tensor, embed_VC: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden_NC, embed_VC)
        return functional.linear(hidden_NC, embed_VC)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden_NC, embed_VC = ctx.saved_tensors
        (grad_NV,) = grads
        if (sink := getattr(embed_VC, "gradient_sink", None)) is None:
            return grad_NV @ embed_VC, grad_NV.T @ hidden_NC
        for first in range(0, len(embed_VC), _SINK_ROWS):
            rows = slice(first, min(first + _SINK_ROWS, len(embed_VC)))
            sink(rows, grad_NV[:, rows].T @ hidden_NC)
        return grad_NV @ embed_VC, None


_SINK_ROWS = 4096


class Rotary:
    """Rotary position embedding with transformers' own frequencies (scaled variants included).

    Not a module: its float32 frequencies must never follow a cast of the model to bfloat16.
    """

    def __init__(self, inv_freq: torch.Tensor, *, scaling: float) -> None:
        self.inv_freq = inv_freq.detach().float().clone()
        self.scaling = scaling

    def table(
        self, positions_T: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and *signed* sines, each (T, 1, D): the first half of the sines is negated, so
        that `rotate` needs no negation of its own.
        """
        self.inv_freq = self.inv_freq.to(positions_T.device)
        angles = positions_T[:, None].float() * self.inv_freq
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return (
            torch.cat((cos, cos), dim=-1).to(dtype)[:, None],
            torch.cat((-sin, sin), dim=-1).to(dtype)[:, None],
        )


def rotate(x_TXD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of every head (RoFormer, arXiv 2104.09864, half-split layout)."""
    half = x_TXD.shape[-1] // 2
    return torch.addcmul(x_TXD * cos_T1D, x_TXD.roll(half, -1), sin_T1D)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension (arXiv 1910.07467, eq. 4), computed in float32
    or wider; the result has the type of the weight.
    """
    wide = widened(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(weight.dtype)


def widened(x: torch.Tensor) -> torch.Tensor:
    """At least float32. The residual stream is kept so: its 2 · layers sums, rounded to bfloat16,
    were the largest source of noise between engine and trainer.
    """
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def row_ranges(
    shape: Shape, intermediate: int
) -> dict[str, tuple[tuple[str, int, int | None], ...]]:
    """Ledger of the fused rows: our name → (transformers' name, first row, end row or None where
    the tensor is not split).
    """
    q_end = shape.heads * shape.head_dim
    k_end = q_end + shape.kv_heads * shape.head_dim
    v_end = k_end + shape.kv_heads * shape.head_dim
    return {
        "input_norm": (("input_layernorm", 0, None),),
        "qkv": (("self_attn.q_proj", 0, q_end), ("self_attn.k_proj", q_end, k_end),
                ("self_attn.v_proj", k_end, v_end)),
        "q_norm": (("self_attn.q_norm", 0, None),),
        "k_norm": (("self_attn.k_norm", 0, None),),
        "out": (("self_attn.o_proj", 0, None),),
        "mlp_norm": (("post_attention_layernorm", 0, None),),
        "gate_up": (("mlp.gate_proj", 0, intermediate),
                    ("mlp.up_proj", intermediate, 2 * intermediate)),
        "down": (("mlp.down_proj", 0, None),),
    }  # fmt: skip


def fused_tensors(
    state: Mapping[str, torch.Tensor], *, shape: Shape, intermediate: int, dtype: torch.dtype
) -> dict[str, torch.Tensor] | None:
    """The tensors of a `Decoder` from a transformers state, or None where the names are not
    exactly those of a Llama-like model.
    """
    remaining = dict(state)
    tensors = {"embed": remaining.pop("model.embed_tokens.weight", None),
               "norm": remaining.pop("model.norm.weight", None)}  # fmt: skip
    if (head := remaining.pop("lm_head.weight", None)) is not None:
        tensors["head"] = head
    for index in range(shape.layers):
        for name, parts in row_ranges(shape, intermediate).items():
            for suffix, ours in (("weight", name), ("bias", f"{name}_bias")):
                keys = [f"model.layers.{index}.{part}.{suffix}" for part, _, _ in parts]
                found = [remaining.pop(key) for key in keys if key in remaining]
                if len(found) == len(keys):
                    tensors[f"{index}.{ours}"] = torch.cat(found) if len(found) > 1 else found[0]
                elif found:
                    return None
    needed = [f"{i}.{n}" for i in range(shape.layers) for n in ("qkv", "out", "gate_up", "down")]
    if remaining or any(tensors.get(key) is None for key in ("embed", "norm", *needed)):
        return None
    return {key: tensor.detach().to(dtype, copy=True) for key, tensor in tensors.items()
            if tensor is not None}  # fmt: skip


def write_pretrained(model: Any, directory: Path) -> None:
    """Config and safetensors of anything with `config`, `dtype` and `named_views`, and beside them
    the tokenizer of the model it was loaded from.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        config = type(model.config).from_dict(model.config.to_dict())
        config.dtype = model.dtype
        config.save_pretrained(directory)
        tensors = {name: view.contiguous() for name, view in model.named_views().items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        source = Path(model.config.name_or_path or directory)
        for companion in (path for pattern in _COMPANIONS for path in source.glob(pattern)):
            if companion.parent != directory and companion.is_file():
                shutil.copyfile(companion, directory / companion.name)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the model to {directory}: {error}.", "free space or choose another place"
        ) from error
