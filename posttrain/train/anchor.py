"""An anchor against forgetting: stay close to the starting model on rows of other tasks.

The rows are prompts that are not trained on with the starting model's own continuation. At their
masked tokens the loss is the forward KL(start ‖ policy) over the vocabulary, its rare tokens taken
together: the starting model's 256 likeliest tokens and one remainder. Measured on a 135M model
after random changes of three sizes, that gives the gradient of the full KL to 0.5 % (64 tokens:
2 %), costs 3 KiB a token once, and needs neither a second forward pass nor a frozen copy.

It is not the reference of an algorithm's KL term, which is about the trained tokens. The one thing
that must stay true: targets are those of the starting weights, after a resume too, so they are
saved with every checkpoint.

Legend of suffixes: _U positions with logits, _N anchored tokens, _V vocabulary, _K likeliest
tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from posttrain.core import seeds
from posttrain.core.errors import UsageError
from posttrain.core.trajectory import Row
from posttrain.train.batch import Batch, Model
from posttrain.train.logprobs import wide
from posttrain.train.pack import MicroBatch, Trainable, lined_up, trained_indices

LIKELIEST = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the starting model gave at N anchored tokens."""

    ids_NK: torch.Tensor
    """Its likeliest tokens."""
    logprobs_NK: torch.Tensor
    """Their log-probabilities."""
    remainder_N: torch.Tensor
    """Log-probability of all others together."""


class Anchor:
    """A fixed set of rows with their targets. Build it with `anchored`."""

    def __init__(self, rows: Sequence[Row], targets: Sequence[Targets], *, seed: int = 0) -> None:
        self._rows, self._targets = tuple(rows), tuple(targets)
        order = range(len(self._rows))
        self._order = sorted(order, key=lambda index: seeds.hashed("anchor", seed, index))

    def batches(self, step: int, *, count: int, budget: int) -> list[tuple[MicroBatch, Targets]]:
        """The rows of a step: `count` of them in turn through the set, the same for every run."""
        count = min(count, len(self._rows))
        turn = [self._order[(step * count + i) % len(self._order)] for i in range(count)]
        micros, first = [], 0
        for micro in lined_up(_weighted([self._rows[index] for index in turn]), budget=budget):
            own = [self._targets[index] for index in turn[first : first + micro.num_rows]]
            micros.append((micro, _joined(own)))
            first += micro.num_rows
        return micros

    def state(self) -> dict[str, torch.Tensor]:
        """Everything, as tensors for a checkpoint."""
        whole = _joined(self._targets)
        lengths = [len(row.ids_T) for row in self._rows]
        return {
            "ids": torch.tensor([i for row in self._rows for i in row.ids_T]),
            "mask": torch.tensor([m for row in self._rows for m in row.mask_T]),
            "lengths": torch.tensor(lengths),
            "order": torch.tensor(self._order),
            "likeliest": whole.ids_NK,
            "logprobs": whole.logprobs_NK,
            "remainder": whole.remainder_N,
        }

    @staticmethod
    def restored(state: Mapping[str, torch.Tensor]) -> Anchor:
        """The anchor whose `state` this is."""
        lengths = state["lengths"].tolist()
        rows = [
            anchor_row(ids.tolist(), mask.tolist())
            for ids, mask in zip(
                state["ids"].split(lengths), state["mask"].split(lengths), strict=True
            )
        ]
        sizes = [len(trained_indices(row)) for row in rows]
        columns = (state[key].split(sizes) for key in ("likeliest", "logprobs", "remainder"))
        targets = [
            Targets(ids_NK=ids, logprobs_NK=logprobs, remainder_N=remainder)
            for ids, logprobs, remainder in zip(*columns, strict=True)
        ]
        anchor = Anchor(rows, targets)
        anchor._order = state["order"].tolist()
        return anchor


def anchor_row(ids: Sequence[int], mask: Sequence[bool]) -> Row:
    """A row that is anchored where `mask` is true."""
    return replace(Row().given(tuple(ids)), mask_T=tuple(mask))


def anchored(
    model: Model, rows: Sequence[Row], *, budget: int, seed: int = 0
) -> Generator[None, None, Anchor]:
    """Compute the targets of the rows from the model's weights now; yields between micro-batches.

    Raises:
        UsageError: no row has a masked token.
    """
    rows = [row for row in rows if trained_indices(row)]
    if not rows:
        raise UsageError(
            "no anchor row has a masked token, so there is nothing to stay close to.",
            "give the anchor rows with the model's own continuation, or set anchor_weight = 0",
        )
    targets: list[Targets] = []
    done = 0
    for micro in lined_up(_weighted(rows), budget=budget):
        batch = Batch.of(micro, dtype=torch.float32)
        with torch.no_grad():
            found = _targets(batch.logits(model)[batch.rows_N])
        sizes = [len(trained_indices(row)) for row in rows[done : done + micro.num_rows]]
        columns = (found.ids_NK, found.logprobs_NK, found.remainder_N)
        targets += [
            Targets(ids_NK=ids, logprobs_NK=logprobs, remainder_N=remainder)
            for ids, logprobs, remainder in zip(*(c.split(sizes) for c in columns), strict=True)
        ]
        done += micro.num_rows
        yield
    return Anchor(rows, targets, seed=seed)


def divergence(logits_NV: torch.Tensor, targets: Targets) -> torch.Tensor:
    """KL(start ‖ policy) of each anchored token over K tokens and the remainder, in nats, (N,)."""
    logprobs_NV = wide(logits_NV).log_softmax(-1)
    kind = logprobs_NV.dtype
    start_NK, start_N = targets.logprobs_NK.to(kind), targets.remainder_N.to(kind)
    likely = (start_NK.exp() * (start_NK - logprobs_NV.gather(1, targets.ids_NK))).sum(-1)
    if targets.ids_NK.shape[1] == logits_NV.shape[1]:
        return likely
    others_N = logprobs_NV.scatter(1, targets.ids_NK, -torch.inf).logsumexp(-1)
    return likely + start_N.exp() * (start_N - others_N)


def _targets(logits_NV: torch.Tensor) -> Targets:
    logprobs_NV = wide(logits_NV).log_softmax(-1)
    logprobs_NK, ids_NK = logprobs_NV.topk(min(LIKELIEST, logprobs_NV.shape[1]))
    others_N = logprobs_NV.scatter(1, ids_NK, -torch.inf).logsumexp(-1)
    return Targets(ids_NK=ids_NK, logprobs_NK=logprobs_NK, remainder_N=others_N)


def _weighted(rows: Sequence[Row]) -> list[Trainable]:
    """Rows whose tokens share one weight: the mean over all of them."""
    share = 1.0 / sum(len(trained_indices(row)) for row in rows)
    return [Trainable(row=row, sequence=index, weight=share) for index, row in enumerate(rows)]


def _joined(targets: Sequence[Targets]) -> Targets:
    return Targets(
        ids_NK=torch.cat([t.ids_NK for t in targets]),
        logprobs_NK=torch.cat([t.logprobs_NK for t in targets]),
        remainder_N=torch.cat([t.remainder_N for t in targets]),
    )
