from __future__ import annotations

import pytest
import torch

from posttrain.train import logprobs
from posttrain.train.logprobs import selected_logprobs


def case(kind, *, positions=7, vocab=50, seed=0):
    chance = torch.Generator().manual_seed(seed)
    logits = torch.randn(positions, vocab, generator=chance, dtype=torch.float64).mul(3).to(kind)
    rows = torch.tensor([0, 0, 1, 3, 3, 3, 6])
    targets = torch.tensor([4, 4, 0, 9, 9, 8, 49])
    shares = torch.randn(len(rows), generator=chance, dtype=torch.float64)
    return logits, rows, targets, shares


def plain(logits, rows, targets, temperature):
    table = (logits.double() / temperature).log_softmax(-1)
    return table[rows, targets], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradient_equal_the_plain_formula(monkeypatch, chunk, temperature):
    monkeypatch.setattr(logprobs, "CHUNK_ROWS", chunk)
    logits, rows, targets, shares = case(torch.float64)
    ours, theirs = logits.clone().requires_grad_(True), logits.clone().requires_grad_(True)
    got = selected_logprobs(ours, rows, targets, temperature=temperature)
    right, entropy = plain(theirs, rows, targets, temperature)
    assert torch.allclose(got.logprobs_N, right, atol=1e-12)
    assert torch.allclose(got.entropy_U, entropy, atol=1e-12)
    (got.logprobs_N * shares).sum().backward()
    (right * shares).sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)


def test_bf16_logits_are_widened_before_anything_is_computed():
    logits, rows, targets, shares = case(torch.bfloat16)
    ours = logits.clone().requires_grad_(True)
    theirs = logits.double().requires_grad_(True)
    got = selected_logprobs(ours, rows, targets)
    right, _ = plain(theirs, rows, targets, 1.0)
    assert got.logprobs_N.dtype == torch.float32
    assert torch.allclose(got.logprobs_N.double(), right, atol=1e-5)
    (got.logprobs_N * shares.float()).sum().backward()
    (right * shares).sum().backward()
    assert ours.grad.dtype == torch.bfloat16
    assert torch.allclose(ours.grad.double(), theirs.grad, atol=1e-2, rtol=1e-2)


def test_the_entropy_has_no_gradient():
    logits, rows, targets, _ = case(torch.float64)
    got = selected_logprobs(logits.requires_grad_(True), rows, targets)
    assert not got.entropy_U.requires_grad


def test_greedy_attempts_cannot_be_trained_on():
    logits, rows, targets, _ = case(torch.float64)
    with pytest.raises(AssertionError, match="temperature above 0"):
        selected_logprobs(logits, rows, targets, temperature=0.0)
