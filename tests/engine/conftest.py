from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.engine.model import random_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose distributions are far from uniform."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return random_model(directory, seed=1, layers=2, hidden=48, heads=6, initializer_range=0.15)
