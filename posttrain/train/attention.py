"""Attention over packed trees: a root sees itself, a branch sees its root and itself.

Not a kernel: batched products over trees of similar size, with the query heads of one key-value
head folded into the rows, so that keys are neither repeated nor copied for a branch. For short
parts on a CPU this is many times faster than torch's scaled-dot-product; long ones, whose scores
would not fit, use that one. Scores are float32 in a bf16 model: this costs nothing for short parts
and leaves the rounding of the output as the only one, so that an engine which pages its keys
differently still gets the same bits nearly everywhere. The one thing that must stay true: no token
ever sees a token of another branch or another tree.

Legend of suffixes: _T tokens of the micro-batch, _P places of the padded layout, _G trees of a
bucket, _R root tokens (padded), _B branches (padded), _L branch tokens (padded), _H query heads,
_K key-value heads, _M query heads per key-value head, _D head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from posttrain.train.logprobs import wide
from posttrain.train.pack import Tree

LONG_SCORES = 1 << 20
"""Scores per head above which a bucket's part goes to torch's memory-saving attention."""
PADDING_LIMIT = 1.5
"""A bucket's scores, padding included, may be this many times those of its trees alone."""


@dataclass(frozen=True, slots=True)
class _Size:
    """Padded shape of one or more trees."""

    trees: int
    root: int
    branches: int
    branch: int

    @property
    def scores(self) -> int:
        return self.trees * (self.root**2 + self.branches * self.branch * (self.root + self.branch))

    def joined(self, other: _Size) -> _Size:
        return _Size(
            self.trees + other.trees,
            max(self.root, other.root),
            max(self.branches, other.branches),
            max(self.branch, other.branch),
        )


def _size(tree: Tree) -> _Size:
    return _Size(1, len(tree.root), len(tree.branches), max(map(len, tree.branches), default=0))


def _buckets(trees: Sequence[Tree]) -> list[tuple[_Size, list[int]]]:
    """Neighbouring trees that are padded to one shape: (shape, indices of the trees)."""
    buckets: list[tuple[_Size, list[int]]] = []
    alone = 0
    for index, tree in enumerate(trees):
        size = _size(tree)
        if buckets:
            shape, members = buckets[-1]
            joined = shape.joined(size)
            if joined.scores <= PADDING_LIMIT * (alone + size.scores):
                alone += size.scores
                buckets[-1] = (joined, [*members, index])
                continue
        buckets.append((size, [index]))
        alone = size.scores
    return buckets


class PackedAttention:
    """An `Attend` for one micro-batch; built once, used by every layer.

    Ledger of the padded layout: bucket after bucket; within a bucket G·R places of the roots, then
    G·B·L of the branches. `_gather_P` says which token stands at a place (padding: token 0),
    `_places_T` where a token stands.
    """

    def __init__(self, trees: Sequence[Tree], *, device: torch.device | None = None) -> None:
        starts = [0]
        for tree in trees:
            starts.append(starts[-1] + tree.num_tokens)
        places: list[int] = [0] * starts[-1]
        place = 0
        self._buckets: list[_Bucket] = []
        for size, members in _buckets(trees):
            bucket = _Bucket.of(size, [trees[index] for index in members], device=device)
            for number, index in enumerate(members):
                token, root = starts[index], len(trees[index].root)
                first = place + number * size.root
                places[token : token + root] = range(first, first + root)
                token += root
                for nth, branch in enumerate(trees[index].branches):
                    row = number * size.branches + nth
                    first = place + size.trees * size.root + row * size.branch
                    places[token : token + len(branch)] = range(first, first + len(branch))
                    token += len(branch)
            place += bucket.num_places
            self._buckets.append(bucket)
        self._places_T = torch.tensor(places, device=device)
        self._gather_P = torch.zeros(place, dtype=torch.long, device=device)
        self._gather_P[self._places_T] = torch.arange(starts[-1], device=device)
        padding_P = torch.ones(place, dtype=torch.bool, device=device)
        padding_P[self._places_T] = False
        self._padding = padding_P.nonzero().flatten()

    def __call__(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> torch.Tensor:
        """Outputs (T, H, D); the same for every layer, so `layer` is not used."""
        maps = (self._gather_P, self._places_T, self._padding)
        q_P, k_P, v_P = (_ToPlaces.apply(x, *maps) for x in (q_THD, k_TKD, v_TKD))
        parts, start = [], 0
        for bucket in self._buckets:
            end = start + bucket.num_places
            parts.append(bucket.attend(q_P[start:end], k_P[start:end], v_P[start:end]))
            start = end
        return _ToTokens.apply(torch.cat(parts) if len(parts) > 1 else parts[0], *maps)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Trees padded to one shape, with the biases (0 or -inf) that hide what must not be seen."""

    size: _Size
    causal_RR: torch.Tensor
    hidden_GR: torch.Tensor
    """-inf at the padding of a root, which its branches must not see."""
    causal_LL: torch.Tensor

    @staticmethod
    def of(size: _Size, trees: Sequence[Tree], *, device: torch.device | None) -> _Bucket:
        lengths_G = torch.tensor([len(tree.root) for tree in trees], device=device)
        beyond = torch.arange(size.root, device=device) >= lengths_G[:, None]
        return _Bucket(
            size,
            _causal(size.root, device),
            torch.zeros(beyond.shape, device=device).masked_fill_(beyond, -torch.inf),
            _causal(size.branch, device),
        )

    @property
    def num_places(self) -> int:
        size = self.size
        return size.trees * (size.root + size.branches * size.branch)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Outputs of the bucket's places, (places, H, D)."""
        size, cut = self.size, self.size.trees * self.size.root
        roots = [x[:cut].unflatten(0, (size.trees, size.root)) for x in (q, k, v)]
        if size.trees * size.root**2 > LONG_SCORES:
            seen = _flash_roots(*roots).flatten(0, 1)
        else:
            seen = self._roots(*map(wide, roots)).flatten(0, 1).to(q.dtype)
        if not size.branches:
            return seen
        shape = (size.trees, size.branches, size.branch)
        own = [x[cut:].unflatten(0, shape) for x in (q, k, v)]
        parts = (*own, *roots[1:])
        if math.prod(shape) * (size.root + size.branch) > LONG_SCORES:
            grown = self._flash_branches(*parts)
        else:
            grown = self._branches(*map(wide, parts)).to(q.dtype)
        return torch.cat((seen, grown.flatten(0, 2)))

    def _roots(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention, (G, R, H, D) and (G, R, K, D) to (G, R, H, D)."""
        trees, root, heads, width = q.shape
        groups = k.shape[2]
        q = _folded(q, groups)
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        bias = self.causal_RR.to(q.dtype).repeat(heads // groups, 1)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=width**-0.5)
        seen = torch.bmm(scores.softmax(-1), v)
        seen = seen.view(trees, groups, heads // groups, root, width).permute(0, 3, 1, 2, 4)
        return seen.reshape(trees, root, heads, width)

    def _branches(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_root: torch.Tensor,
        v_root: torch.Tensor,
    ) -> torch.Tensor:
        """Branches (G, B, L, ·, D) over their roots (G, R, K, D) and themselves.

        Rows of a product with the root: B·M·L for each (G, K); with themselves: M·L for each
        (G, K, B). Both orders are the same memory.
        """
        trees, branches, length, heads, width = q.shape
        root, groups = k_root.shape[1:3]
        fold = heads // groups
        q = q.view(trees, branches, length, groups, fold, width).permute(0, 3, 1, 4, 2, 5)
        q_root = q.reshape(trees * groups, branches * fold * length, width)
        q_own = q_root.view(-1, fold * length, width)
        k, v = (x.permute(0, 3, 1, 2, 4).reshape(-1, length, width) for x in (k, v))
        k_root, v_root = (x.transpose(1, 2).flatten(0, 1) for x in (k_root, v_root))
        bias_root = self.hidden_GR.to(q.dtype).repeat_interleave(groups, 0)[:, None]
        bias_own = self.causal_LL.to(q.dtype).repeat(fold, 1)
        scale = width**-0.5
        scores = torch.cat(
            (
                torch.baddbmm(bias_root, q_root, k_root.transpose(1, 2), alpha=scale),
                torch.baddbmm(bias_own, q_own, k.transpose(1, 2), alpha=scale).view(
                    trees * groups, -1, length
                ),
            ),
            dim=-1,
        ).softmax(-1)
        own = torch.bmm(scores[..., root:].reshape(-1, fold * length, length), v)
        seen = torch.baddbmm(own.view_as(q_root), scores[..., :root], v_root)
        seen = seen.view(trees, groups, branches, fold, length, width)
        return seen.permute(0, 2, 4, 1, 3, 5).reshape(trees, branches, length, heads, width)

    def _flash_branches(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_root: torch.Tensor,
        v_root: torch.Tensor,
    ) -> torch.Tensor:
        """The same without holding the scores; keys are copied for each branch."""
        trees, branches, length, heads = q.shape[:4]
        k, v = (
            torch.cat((above[:, None].expand(-1, branches, -1, -1, -1), own), dim=2).flatten(0, 1)
            for above, own in ((k_root, k), (v_root, v))
        )
        bias = torch.cat(
            (
                self.hidden_GR[:, None, None].expand(-1, branches, length, -1),
                self.causal_LL.expand(trees, branches, -1, -1),
            ),
            dim=-1,
        )
        seen = functional.scaled_dot_product_attention(
            q.flatten(0, 1).transpose(1, 2),
            _repeated(k, heads),
            _repeated(v, heads),
            attn_mask=bias.flatten(0, 1)[:, None].to(q.dtype),
        )
        return seen.transpose(1, 2).unflatten(0, (trees, branches))


def _flash_roots(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads = q.shape[2]
    return functional.scaled_dot_product_attention(
        q.transpose(1, 2), _repeated(k, heads), _repeated(v, heads), is_causal=True
    ).transpose(1, 2)


def _causal(length: int, device: torch.device | None) -> torch.Tensor:
    return torch.full((length, length), -torch.inf, device=device).triu_(1)


def _folded(q: torch.Tensor, groups: int) -> torch.Tensor:
    """(G, R, H, D) to (G·K, M·R, D)."""
    trees, root, heads, width = q.shape
    q = q.view(trees, root, groups, heads // groups, width).permute(0, 2, 3, 1, 4)
    return q.reshape(trees * groups, -1, width)


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(N, S, K, D) to (N, H, S, D); torch's own grouping of heads is slow on a CPU."""
    return x.transpose(1, 2).repeat_interleave(heads // x.shape[2], dim=1)


# Both moves are gathers in both directions: every token stands at exactly one place, so that no
# backward pass needs the serial scatter-add that indexing would bring.


class _ToPlaces(torch.autograd.Function):
    """Tokens to padded places."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gather_P: torch.Tensor, places_T: torch.Tensor, _: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(places_T)
        return x.index_select(0, gather_P)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places_T,) = ctx.saved_tensors
        return grads[0].index_select(0, places_T), None, None, None


class _ToTokens(torch.autograd.Function):
    """Padded places to tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        gather_P: torch.Tensor,
        places_T: torch.Tensor,
        padding: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(gather_P, padding)
        return y.index_select(0, places_T)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        gather_P, padding = ctx.saved_tensors
        grad = grads[0].index_select(0, gather_P)
        return grad.index_fill_(0, padding, 0.0), None, None, None
