import asyncio
import os
import sys
import threading
import time

import pytest

from posttrain.core.errors import UsageError, WorkerError
from posttrain.sandbox import wire
from posttrain.sandbox.worker import ProcessWorkers
from tests.sandbox.conftest import processes_named

HERE = "tests.sandbox.worker_functions"


@pytest.fixture(scope="module")
def workers():
    """One process for all tests, from many loops."""
    source = ProcessWorkers(processes=1, memory_bytes=1 << 30)
    yield source
    source.check()
    asyncio.run(source.close())


def call(workers, name, *arguments, timeout_s=20.0):
    return asyncio.run(workers.call(f"{HERE}:{name}", *arguments, timeout_s=timeout_s))


def test_returns_the_functions_value_and_keeps_the_process(workers):
    assert call(workers, "add", 1, 2) == 3
    assert call(workers, "add", ["a"], ["é\ud800"]) == ["a", "é\ud800"]
    assert call(workers, "pid") == call(workers, "pid") != os.getpid()
    assert call(workers, "answer", "tuple") == [1, "a", None, True, 0.5, {"k": []}]


def test_hashes_are_the_same_in_every_process():
    def once():
        async def body():
            async with ProcessWorkers() as workers:
                return await workers.call(f"{HERE}:hash_of", "text", timeout_s=20)

        return asyncio.run(body())

    assert once() == once()


def test_prints_do_not_corrupt_the_answer(workers):
    assert call(workers, "noisy") == "quiet"


@pytest.mark.parametrize("kind", ["nan", "inf", "set", "bytes", "key", "object"])
def test_an_answer_that_is_no_json_value_is_an_error(workers, kind):
    with pytest.raises(WorkerError, match="no JSON value"):
        call(workers, "answer", kind)


def test_whatever_is_raised_is_told(workers):
    before = call(workers, "pid")
    with pytest.raises(WorkerError, match="fail raised ValueError: why"):
        call(workers, "fail", "why")
    with pytest.raises(WorkerError, match="KeyboardInterrupt"):
        call(workers, "fail_hard")
    with pytest.raises(WorkerError, match="MemoryError"):
        call(workers, "hungry")
    assert call(workers, "pid") == before


@pytest.mark.parametrize(
    ("name", "story"), [("leave", "exit code 3"), ("crash", "exit code -11"), ("corrupt", "died")]
)
def test_a_process_that_dies_or_talks_nonsense_is_replaced(workers, name, story):
    with pytest.raises(WorkerError, match=story):
        call(workers, name)
    assert call(workers, "add", 1, 1) == 2


@pytest.mark.parametrize(
    "function", [f"{HERE}:missing", "no.such.module:f", f"{HERE}:NOT_CALLABLE"]
)
def test_a_function_that_cannot_be_loaded_is_said(workers, function):
    with pytest.raises(WorkerError, match="could not be loaded"):
        asyncio.run(workers.call(function, timeout_s=5))


def test_mistakes_of_the_caller_are_said(workers):
    with pytest.raises(UsageError, match="module:name"):
        asyncio.run(workers.call("no_colon", timeout_s=1))
    with pytest.raises(UsageError, match="no JSON values"):
        call(workers, "add", float("nan"), 1)
    with pytest.raises(UsageError, match="no JSON values"):
        call(workers, "add", {1}, 1)
    with pytest.raises(UsageError, match="at least one"):
        ProcessWorkers(processes=0)


def test_endless_code_ends_in_every_context():
    """The limit was once an alarm signal, which exists only in the main thread and only in whole
    seconds (BR-26)."""

    async def body():
        async with ProcessWorkers(processes=2) as workers:
            await workers.call(f"{HERE}:add", 1, 1, timeout_s=20)

            def in_thread():
                async def inner():
                    assert await workers.call(f"{HERE}:add", 1, 1, timeout_s=20) == 2
                    with pytest.raises(WorkerError, match=r"time limit \(0.3 s\)"):
                        await workers.call(f"{HERE}:spin", timeout_s=0.3)
                    return True

                return asyncio.run(inner())

            outcomes = await asyncio.gather(*(asyncio.to_thread(in_thread) for _ in range(3)))
            assert outcomes == [True] * 3
            started = time.monotonic()
            with pytest.raises(WorkerError, match="time limit"):
                await workers.call(f"{HERE}:spin", timeout_s=0.3)
            assert time.monotonic() - started < 10
            assert workers.stats().timed_out == 4

    asyncio.run(body())
    assert threading.active_count() < 40


def test_a_timeout_kills_what_the_function_started(workers, marker):
    with pytest.raises(WorkerError, match="time limit"):
        call(workers, "sleep_ignoring_signals", marker, timeout_s=0.5)
    started = time.monotonic()
    while processes_named(marker):
        assert time.monotonic() - started < 10


def test_calls_queue_for_a_free_process(workers):
    async def body():
        calls = [workers.call(f"{HERE}:add", i, 1, timeout_s=20) for i in range(12)]
        return await asyncio.gather(*calls)

    assert asyncio.run(body()) == list(range(1, 13))


def test_a_cancelled_call_frees_its_process(workers):
    async def body():
        task = asyncio.ensure_future(workers.call(f"{HERE}:spin", timeout_s=60))
        before = workers.stats().calls
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await workers.call(f"{HERE}:add", 1, 1, timeout_s=20) == 2
        assert workers.stats().calls >= before

    asyncio.run(body())


def test_only_harmless_variables_reach_the_process(workers, monkeypatch):
    monkeypatch.setenv("API_KEY_OF_THE_PARENT", "secret")

    async def body():
        async with ProcessWorkers() as fresh:
            return await fresh.call(f"{HERE}:variables", timeout_s=20)

    seen = asyncio.run(body())
    assert "secret" not in seen.values()
    assert seen["PYTHONHASHSEED"] == "0"


@pytest.mark.parametrize("listed", [True, False])
def test_a_process_has_the_package_that_this_one_imported(tmp_path, monkeypatch, listed):
    """Another checkout, or the user's folder, came before it; `listed` on our own search path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for name in ("posttrain", *(() if listed else ("json", "math"))):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of somebody else')")
    if listed:
        sys.path.insert(0, str(tmp_path))

    async def body():
        async with ProcessWorkers() as fresh:
            return await fresh.call(f"{HERE}:file_of", "posttrain.sandbox.wire", timeout_s=20)

    assert asyncio.run(body()) == wire.__file__


def test_closing_fails_calls_and_leaves_no_process():
    async def body():
        workers = ProcessWorkers()
        pid = await workers.call(f"{HERE}:pid", timeout_s=20)
        running = asyncio.ensure_future(workers.call(f"{HERE}:spin", timeout_s=60))
        waiting = asyncio.ensure_future(workers.call(f"{HERE}:spin", timeout_s=60))
        await asyncio.sleep(0)
        await workers.close()
        await workers.close()
        for task in (running, waiting):
            with pytest.raises(WorkerError):
                await task
        with pytest.raises(WorkerError, match="closed"):
            await workers.call(f"{HERE}:pid", timeout_s=1)
        return pid

    assert not os.path.exists(f"/proc/{asyncio.run(body())}")
