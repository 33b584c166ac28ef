from __future__ import annotations

import pytest
import torch

from posttrain.engine.model import load, random_model


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("models") / "tiny", hidden=32, seed=3)


@pytest.fixture
def exact_model(tiny_directory):
    """Float64: what disagrees here is a logic error, not rounding."""
    return load(tiny_directory, dtype=torch.float64, verify=False).requires_grad_(True)


@pytest.fixture
def model(tiny_directory):
    return load(tiny_directory, dtype=torch.float32, verify=False).requires_grad_(True)
