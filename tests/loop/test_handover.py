import asyncio
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from posttrain.core.ports import SampleRequest, Work
from posttrain.core.trajectory import Sampling
from posttrain.engine import model as models
from posttrain.engine.settings import EngineSettings
from posttrain.loop.handover import TrainedEngine
from posttrain.schedule.device import EngineFirst


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TrainedEngine:
    path = models.random_model(tmp_path_factory.mktemp("model"), layers=1, hidden=32)
    decoder = models.load(path, dtype=torch.float32)
    settings = EngineSettings(max_batch=4, max_step_tokens=64, cache_tokens=512)
    return TrainedEngine(models.skeleton_over(decoder), settings=settings, policy=EngineFirst())


def nothing() -> Generator[None, None, str]:
    return "updated"
    yield


def broken() -> Generator[None, None, str]:
    raise ArithmeticError("the update failed")
    yield


def test_an_update_brings_its_version_along_in_the_same_work_item(engine: TrainedEngine) -> None:
    async def body() -> None:
        with engine:
            before = engine.stats().versions["train"]
            with engine.handing_over(before + 1, before):
                assert await engine.run(Work.UPDATE, nothing()) == "updated"
            assert engine.stats().versions["train"] == before + 1
            await engine.publish(version=before + 1, parent=before)  # nothing is left to do
            request = SampleRequest(ids=(5, 6), sampling=Sampling(max_tokens=2))
            assert set((await engine.sample(request)).versions) == {before + 1}

    asyncio.run(body())


def test_an_update_that_fails_or_never_comes_makes_no_version(engine: TrainedEngine) -> None:
    async def body() -> None:
        with engine:
            before = engine.stats().versions["train"]
            with (
                pytest.raises(ArithmeticError),
                engine.handing_over(before + 1, before),
            ):
                await engine.run(Work.UPDATE, broken())
            with engine.handing_over(before + 1, before):
                pass
            await engine.pin("eval")  # an update of another kind
            assert engine.stats().versions == {"train": before, "eval": before}

    asyncio.run(body())


def test_micro_batches_do_not_hand_over(engine: TrainedEngine, tmp_path: Path) -> None:
    async def body() -> None:
        with engine:
            before = engine.stats().versions["train"]
            with engine.handing_over(before + 1, before):
                await engine.run(Work.TRAIN, nothing())
                assert engine.stats().versions["train"] == before

    asyncio.run(body())
