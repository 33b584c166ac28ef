from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

from posttrain.core.errors import EngineError
from posttrain.core.ports import Work
from posttrain.engine.model import full_attention, load, skeleton_over
from posttrain.engine.packed import PackedDecoder
from posttrain.engine.weights import Weights
from tests.engine.asking import ask, engine, sample_all


@pytest.fixture
def weights(tiny) -> Weights:
    return Weights(load(tiny, dtype=torch.float32), version=2)


def test_publishing_keeps_the_lineage(weights):
    weights.publish(version=3, parent=2)
    weights.publish(version=7, parent=3)
    assert weights.lineage == {3: 2, 7: 3}
    assert weights.versions == {"train": 7}


@pytest.mark.parametrize(("version", "parent"), [(2, 1), (1, 0), (5, 4)])
def test_a_version_that_does_not_grow_or_has_no_parent_is_refused(weights, version, parent):
    with pytest.raises(EngineError):
        weights.publish(version=version, parent=parent)
    assert weights.versions == {"train": 2}


def test_a_pinned_slot_is_a_copy_and_pinning_again_renews_it(weights):
    assert weights.pin("serve") == 2
    train, serve = weights.slot("train").model, weights.slot("serve").model
    with torch.no_grad():
        train.norm.add_(1.0)
    assert not torch.equal(serve.norm, train.norm)
    weights.publish(version=3, parent=2)
    assert weights.pin("serve") == 3
    assert torch.equal(serve.norm, train.norm)
    assert weights.slot("serve").model is serve


def test_an_empty_slot_says_which_are_filled(weights):
    with pytest.raises(EngineError, match=r"'eval' is empty \(filled: train\)"):
        weights.slot("eval")


def test_packed_products_have_the_same_bits_and_follow_a_refresh(tiny):
    """Speed must not change a single result."""
    plain = load(tiny, dtype=torch.bfloat16)
    if not PackedDecoder.suits(plain):
        pytest.skip("this machine has no packed products in bfloat16")
    packed = PackedDecoder(plain)
    for rows in (2, 5, 33):
        ids, positions = torch.arange(rows) + 7, torch.arange(rows)
        attend = full_attention(positions)

        def run(model, ids=ids, positions=positions, attend=attend):
            return model.logits(model.hidden(ids, positions, attend))

        assert torch.equal(run(plain), run(packed))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.25)
    assert not torch.equal(run(plain), run(packed))
    packed.refresh()
    assert torch.equal(run(plain), run(packed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_update_on_the_thread_is_seen_by_the_next_step(tiny, dtype):
    """With and without a publication: a restored checkpoint is an update too."""
    trained = load(tiny, dtype=dtype)
    request = ask([5, 6, 7], temperature=0.0, max_tokens=8)

    def flip():
        trained.embed.copy_(trained.embed.flip(0))
        trained.layers[0].down.mul_(-1.0)
        return
        yield

    async def body():
        with engine(skeleton_over(trained)) as running, torch.no_grad():
            before = await running.sample(request)
            await running.pin("eval")
            await running.run(Work.UPDATE, flip())
            after = await running.sample(request)
            pinned = await running.sample(dataclasses.replace(request, slot="eval"))
            await running.publish(version=1, parent=0)
            await running.pin("eval")
            renewed = await running.sample(dataclasses.replace(request, slot="eval"))
            return before, after, pinned, renewed

    before, after, pinned, renewed = asyncio.run(body())
    (fresh,) = sample_all(trained, [request])
    assert before.ids == pinned.ids
    assert after.ids == renewed.ids == fresh.ids
    assert before.ids != after.ids
    assert set(renewed.versions) == {1}
