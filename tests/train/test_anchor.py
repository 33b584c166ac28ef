from __future__ import annotations

import pytest
import torch

from posttrain.core.errors import UsageError
from posttrain.train import anchor as anchor_module
from posttrain.train.anchor import Anchor, anchor_row, anchored, divergence
from posttrain.train.batch import Batch

ROWS = [
    anchor_row([5, 6, 7, 8], [False, False, True, True]),
    anchor_row([9, 1, 2], [False, True, True]),
    anchor_row([4, 4, 4, 4, 3], [False, False, False, False, True]),
]


def made(model, rows=ROWS, budget=100):
    items = anchored(model, rows, budget=budget)
    while True:
        try:
            next(items)
        except StopIteration as stop:
            return stop.value


def total(model, anchor, *, step=0, count=3, budget=100):
    loss = torch.zeros((), dtype=torch.float64)
    for micro, targets in anchor.batches(step, count=count, budget=budget):
        batch = Batch.of(micro, dtype=torch.float64)
        kl = divergence(batch.logits(model)[batch.rows_N], targets)
        loss = loss + (batch.tokens.weight_N * kl).sum()
    return loss


def disturb(model, size=0.05):
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=chance) * size)


def test_the_starting_weights_are_at_the_minimum(exact_model):
    anchor = made(exact_model)
    loss = total(exact_model, anchor)
    loss.backward()
    assert abs(loss.item()) < 1e-9
    assert max(p.grad.abs().max().item() for p in exact_model.parameters()) < 1e-6
    disturb(exact_model)
    assert total(exact_model, anchor).item() > 1e-4


@pytest.mark.parametrize("likeliest", [320, 40])
def test_it_is_the_kl_over_the_likeliest_and_the_remainder(monkeypatch, exact_model, likeliest):
    monkeypatch.setattr(anchor_module, "LIKELIEST", likeliest)
    anchor = made(exact_model)
    ((micro, _),) = anchor.batches(0, count=3, budget=100)
    batch = Batch.of(micro, dtype=torch.float64)
    start = batch.logits(exact_model)[batch.rows_N].detach().softmax(-1)
    disturb(exact_model)
    now = batch.logits(exact_model)[batch.rows_N].detach().softmax(-1)
    kls = []
    for p, q in zip(start, now, strict=True):
        keep = p.argsort(descending=True)[:likeliest]
        parts_p = [*p[keep].tolist(), 1 - p[keep].sum().item()]
        parts_q = [*q[keep].tolist(), 1 - q[keep].sum().item()]
        pairs = [(a, b) for a, b in zip(parts_p, parts_q, strict=True) if a > 1e-12]
        kls.append(sum(a * torch.tensor(a / b).log().item() for a, b in pairs))
    assert total(exact_model, anchor).item() == pytest.approx(sum(kls) / len(kls), rel=1e-4)


def test_the_split_does_not_matter(exact_model):
    whole, split = made(exact_model, budget=100), made(exact_model, budget=1)
    disturb(exact_model)
    values = {total(exact_model, a, budget=b).item() for a in (whole, split) for b in (1, 100)}
    assert max(values) - min(values) < 1e-6


def test_every_row_has_its_turn_and_a_state_brings_it_back(exact_model):
    anchor = made(exact_model)
    again = Anchor.restored(anchor.state())
    seen = set()
    for step in range(3):
        ((micro, targets),) = anchor.batches(step, count=1, budget=100)
        ((other, others),) = again.batches(step, count=1, budget=100)
        assert micro == other
        assert torch.equal(targets.logprobs_NK, others.logprobs_NK)
        seen.add(tuple(micro.ids_T))
    assert len(seen) == 3


def test_rows_without_a_masked_token_are_refused(exact_model):
    with pytest.raises(UsageError, match="no anchor row"):
        made(exact_model, rows=[anchor_row([1, 2], [False, False])])
