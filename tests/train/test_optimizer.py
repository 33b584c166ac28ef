from __future__ import annotations

import pytest
import torch

from posttrain.core.errors import NonFiniteError
from posttrain.engine.model import full_attention, load, random_model
from posttrain.train.optimizer import MasterAdamW
from posttrain.train.settings import OptimizerSettings, learning_rate_at

PLAN = OptimizerSettings(learning_rate=0.1, warmup_steps=0, clip_norm=1e9)


def parameters(kind=torch.float32, seed=0):
    chance = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 4), "b": (5,)}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=chance).to(kind))
        for name, shape in shapes.items()
    }


def push(named, factor=1.0):
    """A gradient that depends on the parameters, added in two parts."""
    for part in (0.25, 0.75):
        sum((factor * part * p.float() ** 2).sum() for p in named.values()).backward()


def test_updates_equal_torchs_own_adamw():
    ours, theirs = parameters(), parameters()
    optimizer = MasterAdamW(ours.items())
    reference = torch.optim.AdamW(theirs.values(), lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(1, 5):
        push(ours)
        optimizer.update(PLAN, step=step)
        reference.zero_grad()
        sum((p**2).sum() for p in theirs.values()).backward()
        reference.step()
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], atol=1e-6)


def test_small_updates_survive_in_the_masters_of_bf16_parameters():
    named = parameters(torch.bfloat16)
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer = MasterAdamW(named.items())
    plan = OptimizerSettings(learning_rate=1e-4, warmup_steps=0)
    push(named)
    optimizer.update(plan, step=1)
    same = sum(int((named[n] == before[n]).sum()) for n in named)
    assert same > 5  # below the spacing of bf16 most parameters look unchanged,
    for step in range(2, 200):
        push(named)
        optimizer.update(plan, step=step)
    assert all(bool((named[n] != before[n]).any()) for n in named)  # and yet they add up


def test_parameters_keep_their_storage():
    named = parameters(torch.bfloat16)
    places = {name: p.data_ptr() for name, p in named.items()}
    optimizer = MasterAdamW(named.items())
    push(named)
    optimizer.update(PLAN, step=1)
    assert {name: p.data_ptr() for name, p in named.items()} == places


def test_a_large_gradient_is_scaled_to_the_clip_norm():
    named = parameters()
    optimizer = MasterAdamW(named.items())
    push(named)
    expected = torch.cat([2 * p.detach().flatten() for p in named.values()]).norm().item()
    plan = OptimizerSettings(learning_rate=0.1, warmup_steps=0, clip_norm=expected / 4)
    assert optimizer.update(plan, step=1) == pytest.approx(expected)
    first = optimizer.state()["exp_avg"].norm().item()
    assert first == pytest.approx(0.1 * expected / 4, rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    named = parameters()
    optimizer = MasterAdamW(named.items())
    push(named)
    optimizer.update(PLAN, step=1)
    before = {name: value.clone() for name, value in optimizer.state().items()}
    weights = {name: p.detach().clone() for name, p in named.items()}
    push(named, factor=bad)
    with pytest.raises(NonFiniteError, match="no weight was changed"):
        optimizer.update(PLAN, step=2)
    assert all(torch.equal(value, before[name]) for name, value in optimizer.state().items())
    assert all(torch.equal(p, weights[name]) for name, p in named.items())
    push(named)
    assert optimizer.update(PLAN, step=2) > 0


def test_gradients_are_freed_at_once_and_those_forgotten_or_absent_count_nothing():
    named = parameters()
    optimizer = MasterAdamW(named.items())
    push(named)
    assert all(p.grad is None for p in named.values())
    optimizer.zero()
    (named["b"] ** 2).sum().backward()
    expected = (2 * named["b"].detach()).norm().item()
    before = named["a"].detach().clone()
    assert optimizer.update(PLAN, step=1) == pytest.approx(expected)
    assert torch.equal(named["a"], before)


def test_large_gradients_add_up_piece_by_piece():
    size = 2 * (1 << 18) + 3
    weight = torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("w", weight)])
    for scale in (1.0, 2.0, 4.0):
        (scale * weight.float()).sum().backward()
    assert optimizer.update(PLAN, step=1) == pytest.approx(7.0 * size**0.5)


def test_gradients_that_come_by_rows_add_up():
    named = parameters()
    optimizer = MasterAdamW(named.items())
    sink = named["a"].gradient_sink
    for _ in range(2):
        sink(torch.tensor([0, 2, 2]), torch.ones(3, 4))
    named["a"].sum().backward()
    sink(slice(1, 3), torch.full((2, 4), 0.5))
    counts = torch.tensor([3.0, 1.5, 5.5])  # looked up twice, then all rows once, then half of two
    norm = optimizer.update(PLAN, step=1)
    assert norm == pytest.approx(2 * counts.norm().item())


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_have_the_same_gradient_by_rows_as_whole(tmp_path, tied):
    path = random_model(tmp_path / "m", vocab=9000, tie_word_embeddings=tied)
    plain, sunk = (load(path, dtype=torch.float32) for _ in range(2))
    ids, places = torch.tensor([5, 6, 5, 5, 8191, 8192]), torch.arange(6)
    for model in (plain, sunk):
        model.requires_grad_(True)
    optimizer = MasterAdamW(sunk.named_parameters())
    for model in (plain, sunk, plain, sunk):
        hidden = model.hidden(ids, places, full_attention(places))
        model.logits(hidden).log_softmax(-1)[places, ids].sum().backward()
    gradients = [p.grad for p in plain.parameters()]
    assert optimizer.update(PLAN, step=1) == pytest.approx(
        torch.cat([g.flatten() for g in gradients]).norm().item(), rel=1e-5
    )
    first = optimizer.state()["exp_avg"].split([g.numel() for g in gradients])
    for moment, gradient in zip(first, gradients, strict=True):
        assert torch.allclose(moment, 0.1 * gradient.flatten(), rtol=1e-4, atol=1e-6)


def test_a_restored_optimizer_goes_on_bit_for_bit():
    first, second = parameters(), parameters(seed=9)
    one, two = MasterAdamW(first.items()), MasterAdamW(second.items())
    push(first)
    one.update(PLAN, step=1)
    two.restore({name: value.clone() for name, value in one.state().items()})
    for named, optimizer in ((first, one), (second, two)):
        push(named)
        optimizer.update(PLAN, step=2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_learning_rates_by_hand():
    def at(*steps, **changes):
        plan = OptimizerSettings(learning_rate=1.0, **changes)
        return [round(learning_rate_at(step, plan), 4) for step in steps]

    assert at(1, 5, 6, 1000) == [0.2, 1.0, 1.0, 1.0]
    assert at(1, 2, warmup_steps=0) == [1.0, 1.0]
    cosine = dict(schedule="cosine", warmup_steps=0, total_steps=10, final_fraction=0.2)
    assert at(5, 10, 99, **cosine) == [0.6, 0.2, 0.2]
