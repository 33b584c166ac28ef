from __future__ import annotations

import pytest
import torch

from posttrain.core.errors import EngineError
from posttrain.engine.model import load
from posttrain.engine.weights import Weights


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
