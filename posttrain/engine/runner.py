"""One engine step on the device: from a plan to drawn tokens.

Not a scheduler: it runs what `engine.batcher` planned. The one thing that must stay true: the
logits a request draws from are those of its own last position.
"""

from __future__ import annotations

import torch

from posttrain.engine.attention import KeyValues, PagedAttention
from posttrain.engine.batcher import Draw, Step
from posttrain.engine.model import AnyDecoder
from posttrain.engine.sampler import Ask, draw

_MIN_ROWS = 2
"""A single row goes through another matrix kernel, with other roundings, and two cost no more:
so a lone row is doubled, and a token gets the same bits alone as in a batch (in bfloat16).
"""


@torch.inference_mode()
def run_step(step: Step, *, model: AnyDecoder, store: KeyValues) -> list[Draw]:
    """Compute the step's chunks and draw a token for each of its samplers, in order."""
    store.copy(step.copies)
    ids = [i for c in step.chunks for i in c.request.tokens[c.first : c.last]]
    positions = [p for c in step.chunks for p in range(c.first, c.last)]
    padding = max(0, _MIN_ROWS - len(ids))
    hidden_TC = model.hidden(
        torch.tensor(ids + ids[:1] * padding),
        torch.tensor(positions + positions[:1] * padding),
        PagedAttention(step, store),
    )
    last_rows: list[int] = []
    samplers_row: list[int] = []
    row = -1
    for chunk in step.chunks:
        row += chunk.last - chunk.first
        samplers_row += [len(last_rows)] * len(chunk.samplers)
        last_rows += [row] if chunk.samplers else []
    if not last_rows:
        return []
    padding = max(0, _MIN_ROWS - len(last_rows))
    logits_NV = model.logits(hidden_TC[last_rows + last_rows[:1] * padding])
    if samplers_row != list(range(len(logits_NV))):
        logits_NV = logits_NV[samplers_row]
    return draw(logits_NV, [Ask(r.sampling, len(r.tokens)) for r in step.samplers])
