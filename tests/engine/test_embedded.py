from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from posttrain.core.clock import ManualClock
from posttrain.core.errors import EngineError
from posttrain.core.ports import Device, Policy, SampleRequest, Work
from posttrain.core.trajectory import Sampling
from posttrain.engine import embedded
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.model import AnyDecoder, load
from tests.engine.asking import ask, engine


@pytest.fixture(scope="module")
def model(tiny: Path) -> AnyDecoder:
    return load(tiny, dtype=torch.float32)


def items(*results: object, where: list[str] | None = None) -> Generator[None, None, str]:
    for _ in results:
        if where is not None:
            where.append(threading.current_thread().name)
        yield
    return "done"


async def until(reached) -> None:
    """Let the compute thread go on until something is true."""
    while not reached():
        await asyncio.sleep(0)


def test_the_engine_is_a_policy_and_a_device(model):
    running = engine(model)
    assert isinstance(running, Policy)
    assert callable(Device.run)
    assert callable(running.run)


def test_work_runs_on_the_compute_thread_item_by_item(model):
    where: list[str] = []

    async def body() -> str:
        with engine(model) as running:
            return await running.run(Work.TRAIN, items(1, 2, 3, where=where))

    assert asyncio.run(body()) == "done"
    assert where == ["compute"] * 3


def test_the_device_policy_is_asked_with_what_is_ready(model):
    asked: list[frozenset[Work]] = []

    class Recording:
        def choose(self, ready: frozenset[Work]) -> Work:
            asked.append(ready)
            return max(ready)

    async def body() -> None:
        with engine(model, policy=Recording()) as running:
            await asyncio.gather(
                running.run(Work.TRAIN, items(*range(50))),
                *[running.sample(ask([1], seed=i, max_tokens=30)) for i in range(3)],
            )

    asyncio.run(body())
    assert frozenset({Work.TRAIN, Work.ENGINE}) in asked
    assert all(asked)


def test_a_generators_exception_reaches_its_caller_and_the_engine_goes_on(model):
    def broken() -> Generator[None, None, None]:
        yield
        raise ZeroDivisionError("in the trainer")

    async def body() -> int:
        with engine(model) as running:
            with pytest.raises(ZeroDivisionError, match="in the trainer"):
                await running.run(Work.TRAIN, broken())
            return len((await running.sample(ask([1], max_tokens=3))).ids)

    assert asyncio.run(body()) == 3


def test_cancelling_a_request_frees_its_blocks_within_a_step(model):
    """BR-52: the client went away and generation went on."""

    async def body() -> tuple[embedded.EngineStats, embedded.EngineStats]:
        with engine(model) as running:
            task = asyncio.create_task(running.sample(ask([1, 2, 3], max_tokens=1500)))
            await until(lambda: running.stats().requests.sampled_tokens >= 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            at_cancel = running.stats()
            await until(lambda: running.stats().requests.running == 0)
            await running.sample(ask([4], max_tokens=2))
            return at_cancel, running.stats()

    at_cancel, end = asyncio.run(body())
    assert end.requests.aborted == 1
    assert end.requests.sampled_tokens <= at_cancel.requests.sampled_tokens + 2 + 2
    assert end.blocks.free == end.blocks.total


def test_cancelling_before_the_first_step_and_after_the_end_is_harmless(model):
    async def body() -> embedded.EngineStats:
        with engine(model) as running:
            early = asyncio.create_task(running.sample(ask([1], max_tokens=5)))
            await asyncio.sleep(0)
            early.cancel()
            late = asyncio.create_task(running.sample(ask([1], max_tokens=1)))
            await until(lambda: running.stats().requests.sampled_tokens >= 1)
            late.cancel()
            await asyncio.gather(early, late, return_exceptions=True)
            await running.sample(ask([2], max_tokens=1))
            return running.stats()

    stats = asyncio.run(body())
    assert stats.requests.running == stats.requests.waiting == 0
    assert stats.blocks.free == stats.blocks.total


def test_cancelling_device_work_closes_its_generator(model):
    closed: list[str] = []

    def endless() -> Generator[None, None, None]:
        try:
            while True:
                yield
        finally:
            closed.append(threading.current_thread().name)

    async def body() -> None:
        with engine(model) as running:
            task = asyncio.create_task(running.run(Work.TRAIN, endless()))
            await until(lambda: running.stats().busy_s["train"] > 0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await running.run(Work.UPDATE, items(1))

    asyncio.run(body())
    assert closed == ["compute"]


def test_random_submissions_and_cancellations_leak_nothing(model):
    async def one(running: EmbeddedEngine, index: int) -> None:
        task = asyncio.create_task(
            running.sample(
                ask([index % 3] * (1 + index % 20), seed=index, max_tokens=1 + index % 17)
            )
        )
        for _ in range(index % 7):
            await asyncio.sleep(0)
        if index % 3 == 0:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def body() -> embedded.EngineStats:
        with engine(model, cache_tokens=160, max_batch=6, max_step_tokens=12) as running:
            await asyncio.gather(*[one(running, index) for index in range(60)])
            await running.run(Work.UPDATE, items(1))
            stats = running.stats()
        running._batcher.check()
        return stats

    stats = asyncio.run(body())
    assert stats.requests.running == stats.requests.waiting == 0
    assert stats.blocks.free == stats.blocks.total


def test_a_failing_step_fails_everyone_waiting_and_the_engine_serves_again(model, monkeypatch):
    prompt = range(3, 43)

    async def body() -> int:
        with engine(model) as running:
            with monkeypatch.context() as broken:
                broken.setattr(embedded, "run_step", lambda *a, **k: 1 / 0)
                results = await asyncio.gather(
                    *[running.sample(ask([*prompt, i])) for i in range(3)], return_exceptions=True
                )
                shared = running.stats().requests.shared_tokens
            assert all(isinstance(result, EngineError) for result in results)
            assert all("division by zero" in str(result) for result in results)
            again = await running.sample(ask(prompt, max_tokens=4))
            assert running.stats().requests.shared_tokens == shared, "nothing of it was computed"
            return len(again.ids)

    assert asyncio.run(body()) == 4


def test_weights_that_are_not_finite_are_an_error_not_a_token(tiny):
    broken = load(tiny, dtype=torch.float32)
    with torch.no_grad():
        broken.norm.fill_(torch.nan)

    async def body() -> None:
        with engine(broken) as running:
            await running.sample(ask([1]))

    with pytest.raises(EngineError, match="not finite"):
        asyncio.run(body())


def test_a_thread_that_breaks_fails_everyone_and_everyone_later(model):
    class Broken:
        def choose(self, ready: frozenset[Work]) -> Work:
            raise LookupError("no choice")

    async def body() -> list[object]:
        with engine(model, policy=Broken()) as running:
            waiting = await asyncio.gather(
                running.sample(ask([1])), running.run(Work.TRAIN, items(1)), return_exceptions=True
            )
            later = await asyncio.gather(running.sample(ask([1])), return_exceptions=True)
            return [*waiting, *later]

    results = asyncio.run(body())
    assert all(isinstance(result, EngineError) for result in results)
    assert all("no choice" in str(result) for result in results)


def test_stopping_fails_whoever_waits_and_a_stopped_engine_says_so(model):
    async def body() -> list[object]:
        running = engine(model)
        with running:
            tasks = [asyncio.create_task(running.sample(ask([1], max_tokens=1900)))]
            tasks.append(asyncio.create_task(running.run(Work.TRAIN, items(*range(10**6)))))
            await until(lambda: running.stats().busy_s["train"] > 0)
        late = asyncio.create_task(running.sample(ask([1])))
        return await asyncio.gather(*tasks, late, return_exceptions=True)

    results = asyncio.run(body())
    assert all(isinstance(result, EngineError) for result in results)
    assert all("stopped" in str(result) for result in results)


def test_an_engine_that_was_not_started_refuses(model):
    with pytest.raises(EngineError, match="not started"):
        asyncio.run(engine(model).sample(ask([1])))


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ask([]), "without ids"),
        (ask([5000]), "outside the vocabulary of 320"),
        (ask([-1]), "outside the vocabulary"),
        (ask([1], max_tokens=2048), "context of 2048"),
        (ask([1], slot="serve"), "slot 'serve' is empty"),
        (ask(range(300), max_tokens=1740), "the engine has"),
        (SampleRequest(ids=(1,), sampling=Sampling(), media=("ab",)), "no media"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_others_are_not_harmed(
    model, request_, reason
):
    async def body() -> tuple[object, object]:
        with engine(model, cache_tokens=1024) as running:
            return tuple(
                await asyncio.gather(
                    running.sample(request_),
                    running.sample(ask([1], max_tokens=3)),
                    return_exceptions=True,
                )
            )

    refused, served = asyncio.run(body())
    assert isinstance(refused, EngineError)
    assert reason in str(refused)
    assert len(served.ids) == 3  # type: ignore[attr-defined]


def test_versions_only_grow(model):
    async def body() -> None:
        with engine(model, version=5) as running:
            await running.publish(version=6, parent=5)
            with pytest.raises(EngineError, match="published after 6"):
                await running.publish(version=6, parent=5)

    asyncio.run(body())


def test_idle_time_is_counted_under_what_was_waited_for(model):
    clock = ManualClock()

    async def body() -> embedded.EngineStats:
        with engine(model, clock=clock, idle_cause=lambda: "execute") as running:
            await running.sample(ask([1], max_tokens=1))
            while "execute" not in running.stats().idle_s:
                clock.advance(1.0)
                await running.run(Work.UPDATE, items())
            return running.stats()

    stats = asyncio.run(body())
    assert set(stats.idle_s) == {"execute"}
    assert set(stats.busy_s) == {"engine", "train", "update"}
    assert stats.steps == 1
