from __future__ import annotations

import pytest
import torch

from posttrain.engine.attention import KeyValues
from posttrain.engine.blocks import BlockCopy
from posttrain.engine.decoder import Shape

SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=4, value_dim=4, hidden=16, vocab=9,
              max_context=64)  # fmt: skip


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ([(0, 1)], [0, 0, 2, 3, 4]),
        ([(0, 3), (3, 4)], [0, 1, 2, 0, 0]),
        ([(1, 2), (0, 1)], [0, 0, 1, 3, 4]),
        ([], [0, 1, 2, 3, 4]),
    ],
)
def test_copies_act_one_after_the_other(copies, expected):
    """A late member of a group forked a block that its leader got by copy in the same step: read
    all at once, the copies gave it what the block had held before.
    """
    store = KeyValues(SHAPE, num_blocks=5, size=2, dtype=torch.float32)
    for tensor in (*store.keys, *store.values):
        tensor.copy_(torch.arange(5.0).repeat_interleave(2)[None, :, None].expand_as(tensor))
    store.copy([BlockCopy(source, target) for source, target in copies])
    for tensor in (*store.keys, *store.values):
        wanted = torch.tensor(expected).repeat_interleave(2)[None, :, None].expand_as(tensor)
        assert torch.equal(tensor, wanted.float())
