"""Attention of an engine step over key-value blocks.

`KeyValues` is the storage, `PagedAttention` the `Attend` of one step: it writes the new keys and
values, then lets decoding tokens look at their context in buckets of similar length (batched
products over the key-value heads) and every prefill chunk look at its own.

The order of operations is a contract with the trainer (`train.attention`): keys in the order of
their positions, padding only behind them, then `baddbmm`, softmax, `bmm` in the model's type. In
bf16 on a CPU a row of these has the same bits in any batch, so both give one log-probability. The
one thing that must stay true: a token sees exactly the positions of its own sequence up to its own.

Legend of suffixes: _T tokens of the step, _B sequences of a bucket, _L positions of a bucket's
longest context, _S slots (block · size + offset), _H query heads, _K key-value heads, _G query
heads a key-value head, _D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from posttrain.engine.batcher import Chunk, Step
from posttrain.engine.blocks import BlockCopy
from posttrain.engine.decoder import Shape


class KeyValues:
    """Keys and values of all layers: per layer one tensor (K, S, D) each, S = blocks · size."""

    def __init__(self, shape: Shape, *, num_blocks: int, size: int, dtype: torch.dtype) -> None:
        self.shape, self.size, self.num_blocks = shape, size, num_blocks
        slots = num_blocks * size
        self.keys = [torch.zeros(shape.kv_heads, slots, shape.head_dim, dtype=dtype)
                     for _ in range(shape.layers)]  # fmt: skip
        self.values = [torch.zeros(shape.kv_heads, slots, shape.value_dim, dtype=dtype)
                       for _ in range(shape.layers)]  # fmt: skip

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks as if one after the other: a target may be the source of a later copy."""
        if not copies:
            return
        origin: dict[int, int] = {}
        for copy in copies:
            origin[copy.target] = origin.get(copy.source, copy.source)
        sources, targets = torch.tensor(list(origin.values())), torch.tensor(list(origin))
        for store in (*self.keys, *self.values):
            blocks = self._blocks(store)
            blocks.index_copy_(1, targets, blocks.index_select(1, sources))

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some blocks in the given order, each (K, len(blocks) · size, D)."""
        found = (self._blocks(store[layer]).index_select(1, blocks)
                 for store in (self.keys, self.values))  # fmt: skip
        k, v = (x.view(self.shape.kv_heads, len(blocks) * self.size, -1) for x in found)
        return k, v

    def _blocks(self, store: torch.Tensor) -> torch.Tensor:
        return store.view(store.shape[0], self.num_blocks, -1)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Decoding tokens whose contexts fill a similar number of blocks."""

    rows_B: torch.Tensor
    """Rows of the step."""
    blocks: torch.Tensor
    """B tables padded to the longest, flat."""
    bias: torch.Tensor
    """(K · B, 1, L): 0 where the position exists, minus infinity elsewhere."""
    whole: bool
    """The rows are all rows of the step, in order."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One chunk of several tokens."""

    start: int
    stop: int
    """Rows of the step."""
    context: int
    """Positions its last token sees."""
    blocks: torch.Tensor
    bias: torch.Tensor | None
    """(stop - start, context): 0 where visible, minus infinity elsewhere; None: more than
    `LONG_SCORES`.
    """


class PagedAttention:
    """The `Attend` of one step. Rows of the step: chunk after chunk, position after position."""

    def __init__(self, step: Step, store: KeyValues) -> None:
        self._store = store
        size = store.size
        slots: list[int] = []
        decodes: list[tuple[int, Chunk]] = []
        self._prefills: list[_Prefill] = []
        for chunk in step.chunks:
            row, table = len(slots), chunk.request.blocks
            slots += [table[p // size] * size + p % size for p in range(chunk.first, chunk.last)]
            if chunk.last - chunk.first == 1:
                decodes.append((row, chunk))
            else:
                self._prefills.append(self._prefill(row, chunk))
        self._slots_T = torch.tensor(slots)
        self._buckets = self._bucketed(decodes, num_rows=len(slots))

    def __call__(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> torch.Tensor:
        """See `Attend`. Rows beyond the step's own are padding: nothing is kept of them and
        their output is zero.
        """
        store, num_rows = self._store, len(self._slots_T)
        store.keys[layer].index_copy_(1, self._slots_T, k_TKD[:num_rows].transpose(0, 1))
        store.values[layer].index_copy_(1, self._slots_T, v_TKD[:num_rows].transpose(0, 1))
        if len(self._buckets) == 1 and self._buckets[0].whole and num_rows == len(q_THD):
            return self._decode(layer, q_THD, self._buckets[0])
        out_THD = q_THD.new_zeros(*q_THD.shape[:2], store.shape.value_dim)
        for bucket in self._buckets:
            out_THD[bucket.rows_B] = self._decode(layer, q_THD[bucket.rows_B], bucket)
        for prefill in self._prefills:
            rows = slice(prefill.start, prefill.stop)
            out_THD[rows] = self._look_back(layer, q_THD[rows], prefill)
        return out_THD

    def _decode(self, layer: int, q_BHD: torch.Tensor, bucket: _Bucket) -> torch.Tensor:
        """One position a sequence. Batches are key-value head · B + sequence."""
        kv_heads, batch, width = self._store.shape.kv_heads, len(q_BHD), q_BHD.shape[2]
        k, v = self._store.gather(layer, bucket.blocks)
        q = q_BHD.view(batch, kv_heads, -1, width).transpose(0, 1).reshape(
            kv_heads * batch, -1, width
        )  # fmt: skip
        k = k.view(kv_heads * batch, -1, width)
        v = v.view(kv_heads * batch, -1, v.shape[-1])
        scores = torch.baddbmm(bucket.bias, q, k.transpose(1, 2), alpha=width**-0.5)
        out = torch.bmm(scores.softmax(-1), v)
        return out.view(kv_heads, batch, -1, v.shape[-1]).transpose(0, 1).flatten(1, 2)

    def _look_back(self, layer: int, q_THD: torch.Tensor, prefill: _Prefill) -> torch.Tensor:
        """Several positions of one sequence. Batches are key-value heads; rows are query head of
        the group · T + position.
        """
        k, v = (x[:, : prefill.context] for x in self._store.gather(layer, prefill.blocks))
        rows, kv_heads = len(q_THD), len(k)
        q = q_THD.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        if prefill.bias is None:
            out = self._look_far_back(q, k, v)
        else:
            bias = prefill.bias.repeat(q.shape[1], 1).expand(kv_heads, -1, -1)
            scores = torch.baddbmm(
                bias, q.flatten(1, 2), k.transpose(1, 2), alpha=q.shape[3] ** -0.5
            )
            out = torch.bmm(scores.softmax(-1), v).unflatten(1, (-1, rows))
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    @staticmethod
    def _look_far_back(
        q_KGTD: torch.Tensor, k_KLD: torch.Tensor, v_KLD: torch.Tensor
    ) -> torch.Tensor:
        """The same without holding all scores at once; in bf16 its bits differ a little."""
        rows, context = q_KGTD.shape[2], k_KLD.shape[1]
        positions = torch.arange(context)
        visible = positions[None, :] <= positions[context - rows :, None]
        shape = (-1, q_KGTD.shape[1], -1, -1)
        return functional.scaled_dot_product_attention(
            q_KGTD, k_KLD[:, None].expand(shape), v_KLD[:, None].expand(shape), attn_mask=visible
        )

    def _prefill(self, row: int, chunk: Chunk) -> _Prefill:
        table = chunk.request.blocks[: -(-chunk.last // self._store.size)]
        rows, bias = chunk.last - chunk.first, None
        if rows * chunk.last <= LONG_SCORES:
            positions = torch.arange(chunk.last)
            hidden = positions[None, :] > positions[chunk.first :, None]
            bias = torch.zeros(hidden.shape, dtype=self._store.keys[0].dtype)
            bias.masked_fill_(hidden, -torch.inf)
        return _Prefill(row, row + rows, chunk.last, torch.tensor(table), bias)

    def _bucketed(self, decodes: list[tuple[int, Chunk]], *, num_rows: int) -> list[_Bucket]:
        """Group by length, longest at most `_SPREAD` times (plus a block) the shortest."""
        size = self._store.size
        lengths = {row: -(-chunk.last // size) for row, chunk in decodes}
        groups: list[list[tuple[int, Chunk]]] = []
        for row, chunk in sorted(decodes, key=lambda pair: lengths[pair[0]]):
            shortest = lengths[groups[-1][0][0]] if groups else 0
            if not groups or lengths[row] > _SPREAD * shortest + 1:
                groups.append([])
            groups[-1].append((row, chunk))
        return [self._bucket(sorted(group, key=lambda pair: pair[0]), num_rows) for group in groups]

    def _bucket(self, group: list[tuple[int, Chunk]], num_rows: int) -> _Bucket:
        size, store = self._store.size, self._store
        longest = max(-(-chunk.last // size) for _, chunk in group)
        tables = [chunk.request.blocks[:longest] for _, chunk in group]
        flat = [block for t in tables for block in (*t, *t[:1] * (longest - len(t)))]
        ends_B = torch.tensor([chunk.last for _, chunk in group])
        hidden_BL = torch.arange(longest * size)[None, :] >= ends_B[:, None]
        bias_BL = torch.zeros(hidden_BL.shape, dtype=store.keys[0].dtype)
        bias_BL.masked_fill_(hidden_BL, -torch.inf)
        rows = [row for row, _ in group]
        return _Bucket(
            rows_B=torch.tensor(rows),
            blocks=torch.tensor(flat),
            bias=bias_BL.repeat(store.shape.kv_heads, 1)[:, None],
            whole=rows == list(range(num_rows)),
        )


LONG_SCORES = 1 << 20
"""Scores per head above which a chunk goes to torch's memory-saving attention."""
_SPREAD = 1.5
"""A bucket's longest context in blocks, over its shortest; more buckets cost more calls."""
