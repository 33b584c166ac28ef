"""The embedded engine: one compute thread that owns the device, behind asyncio.

It implements `Policy`, `Device` and `WeightSink`. The thread runs one work item at a time: an
engine step, or the next item of a generator handed to `run` (a micro-batch, a weight update); a
`DevicePolicy` says which kind is next. Everything else (submissions, aborts) enters by an inbox
between items. The trainer's parameters change under `Work.UPDATE` alone. The one thing that must
stay true: whoever awaits gets a result or an error, whatever happens in the thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from posttrain.core.clock import RealClock
from posttrain.core.errors import EngineError
from posttrain.core.ports import Clock, DevicePolicy, SampleRequest, Work
from posttrain.core.trajectory import Sampled
from posttrain.engine import threads
from posttrain.engine.attention import KeyValues
from posttrain.engine.batcher import Batcher, BatcherStats
from posttrain.engine.blocks import Blocks, BlockStats
from posttrain.engine.model import AnyDecoder
from posttrain.engine.request import Request
from posttrain.engine.runner import run_step
from posttrain.engine.settings import EngineSettings
from posttrain.engine.text import TokenBytes
from posttrain.engine.weights import TRAIN, Weights

T = TypeVar("T")
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What the engine did since its start."""

    versions: Mapping[str, int]
    """Slot → the version it holds."""
    requests: BatcherStats
    blocks: BlockStats
    steps: int
    """Engine steps."""
    busy_s: Mapping[str, float]
    """Kind of work → seconds the thread spent on it."""
    idle_s: Mapping[str, float]
    """What the thread waited for → seconds."""


class _Waiter:
    """Someone on an event loop who awaits a result of the thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def give(self, result: Any) -> None:
        """Deliver a result, or an exception to raise."""
        try:
            self._loop.call_soon_threadsafe(self._settle, result)
        except RuntimeError:
            assert self._loop.is_closed(), "an open loop takes every call"  # nobody awaits any more

    def _settle(self, result: Any) -> None:
        if self.future.done():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


@dataclass(frozen=True, slots=True)
class _InFlight:
    request: Request
    waiter: _Waiter


@dataclass(frozen=True, slots=True)
class _Job:
    items: Generator[None, None, Any]
    waiter: _Waiter


class EmbeddedEngine:
    """See the module's docstring. A context manager: the thread runs inside the `with`.

    `model` must alias the trainer's storage where there is a trainer (`model.skeleton_over`).
    `idle_cause` is asked, whenever the thread has nothing to do, what it is waiting for.
    """

    def __init__(
        self,
        model: AnyDecoder,
        *,
        settings: EngineSettings,
        policy: DevicePolicy,
        to_bytes: TokenBytes | None = None,
        version: int = 0,
        idle_cause: Callable[[], str] = lambda: "requests",
        clock: Clock | None = None,
    ) -> None:
        self._policy, self._to_bytes, self._idle_cause = policy, to_bytes, idle_cause
        self._clock: Clock = clock or RealClock()
        self._shape = model.shape
        num_blocks = settings.cache_tokens // BLOCK_TOKENS
        self._store = KeyValues(
            model.shape, num_blocks=num_blocks, size=BLOCK_TOKENS, dtype=model.dtype
        )
        self._blocks = Blocks(num_blocks, size=BLOCK_TOKENS)
        self._batcher = Batcher(
            self._blocks, max_batch=settings.max_batch, max_step_tokens=settings.max_step_tokens
        )
        self._weights = Weights(model, version=version)
        self._batcher.renew(TRAIN, version=version)
        self._in_flight: dict[int, _InFlight] = {}
        self._jobs: dict[Work, deque[_Job]] = {Work.TRAIN: deque(), Work.UPDATE: deque()}
        self._orders = 0
        self._steps = 0
        self._busy_s = {kind.value: 0.0 for kind in Work}
        self._idle_s: dict[str, float] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._counting = threading.Lock()
        """Held while what `stats` reads is changed."""
        self._closed: EngineError | None = EngineError("the engine was not started.", "start it")
        self._stopping = False
        self._thread: threading.Thread | None = None

    # --- for callers on an event loop -----------------------------------------------------------

    async def sample(self, request: SampleRequest) -> Sampled:
        """See `Policy`. Cancelling the awaiting task ends the request within one step."""
        waiter, order = _Waiter(), self._next_order()
        self._post(lambda: self._submit(request, order, waiter), waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._post(lambda: self._abort(order), waiter)
            raise

    async def run(self, kind: Work, items: Generator[None, None, T]) -> T:
        """See `Device`. Cancelling the awaiting task closes the generator between two items."""
        assert kind is not Work.ENGINE, "engine steps are the engine's own"
        waiter = _Waiter()
        job = _Job(items, waiter)
        self._post(lambda: self._jobs[kind].append(job), waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._post(lambda: self._drop(kind, job), waiter)
            raise

    async def publish(self, *, version: int, parent: int) -> None:
        """See `WeightSink`: what the trainer's parameters hold is the slot `train`'s new version.
        Requests in flight go on; their tokens say which version sampled them.
        """
        await self.run(Work.UPDATE, self.publication(version, parent))

    def publication(self, version: int, parent: int) -> Generator[None, None, None]:
        """The work item that publishes, for whoever lets it end an update of its own."""
        self._weights.publish(version=version, parent=parent)
        return
        yield

    async def pin(self, slot: str) -> int:
        """Copy the newest published version to a slot of its own; returns that version."""
        return await self.run(Work.UPDATE, self._pinning(slot))

    def stats(self) -> EngineStats:
        """What was done so far; may be called from any thread."""
        with self._counting:
            return EngineStats(
                versions=self._weights.versions,
                requests=self._batcher.stats(),
                blocks=self._blocks.stats(),
                steps=self._steps,
                busy_s=dict(self._busy_s),
                idle_s=dict(self._idle_s),
            )

    def start(self) -> Self:
        """Start the compute thread."""
        assert self._thread is None, "the engine runs already"
        self._closed, self._stopping = None, False
        torch.get_num_threads()  # fixes the caller's own number before the new thread takes more
        self._thread = threading.Thread(target=self._main, name="compute", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread after its current item; whoever still waits gets an `EngineError`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _next_order(self) -> int:
        with self._wake:
            self._orders += 1
            return self._orders

    def _post(self, call: Callable[[], None], waiter: _Waiter) -> None:
        with self._wake:
            if self._closed is None:
                self._inbox.append(call)
                self._wake.notify()
                return
        waiter.give(EngineError(self._closed.message, self._closed.next_step))

    # --- the compute thread ---------------------------------------------------------------------

    def _main(self) -> None:
        reason = EngineError("the engine was stopped.")
        try:
            threads.take_cores()
            while self._read_inbox():
                self._work()
        except Exception as error:
            # The boundary of the thread: whatever broke it is told to everyone who waits.
            reason = EngineError(f"the engine's thread broke: {error!r}.", "restart the run")
            reason.__cause__ = error
        with self._wake:
            self._closed = reason
            calls = list(self._inbox)
            self._inbox.clear()
        for call in calls:
            call()
        self._fail_requests(reason)
        for kind, jobs in self._jobs.items():
            while jobs:
                jobs[0].waiter.give(reason)
                self._drop(kind, jobs[0])

    def _read_inbox(self) -> bool:
        """Carry out what was posted; wait where there is nothing to do. False: stop."""
        with self._wake:
            if not (self._inbox or self._ready() or self._stopping):
                began, cause = self._clock.now_s(), self._idle_cause()
                while not (self._inbox or self._stopping):
                    self._wake.wait()
                waited = self._clock.now_s() - began
                with self._counting:
                    self._idle_s[cause] = self._idle_s.get(cause, 0.0) + waited
            calls = list(self._inbox)
            self._inbox.clear()
            stopping = self._stopping
        with self._counting:
            for call in calls:
                call()
        return not stopping

    def _ready(self) -> frozenset[Work]:
        kinds = {kind for kind, jobs in self._jobs.items() if jobs}
        return frozenset(kinds | ({Work.ENGINE} if self._batcher.has_work else set()))

    def _work(self) -> None:
        """One work item."""
        ready = self._ready()
        if not ready:
            return
        kind = self._policy.choose(ready)
        assert kind in ready, f"the device policy chose {kind}, ready were {sorted(ready)}"
        began = self._clock.now_s()
        if kind is Work.ENGINE:
            self._engine_step()
        else:
            self._next_item(self._jobs[kind])
            if kind is Work.UPDATE:
                self._weights.touch()
                self._batcher.renew(TRAIN, version=self._weights.versions[TRAIN])
        with self._counting:
            self._busy_s[kind.value] += self._clock.now_s() - began

    def _engine_step(self) -> None:
        try:
            with self._counting:
                step = self._batcher.plan()
            assert step is not None, "there is work, and no request can move"
            self._weights.settle()
            slot = self._weights.slot(step.slot)
            draws = run_step(step, model=slot.model, store=self._store)
            with self._counting:
                self._steps += 1
                ended = self._batcher.finish(step, draws)
        except Exception as error:  # mapped here, where it enters
            failure = EngineError(f"an engine step failed: {error}.", "see the cause of this error")
            failure.__cause__ = error
            self._fail_requests(failure)
            return
        for request in ended:
            self._in_flight.pop(request.order).waiter.give(request.result())

    def _next_item(self, jobs: deque[_Job]) -> None:
        job = jobs[0]
        try:
            next(job.items)
        except StopIteration as end:
            jobs.popleft()
            job.waiter.give(end.value)
        except Exception as error:  # the generator's own failure belongs to whoever handed it in
            jobs.popleft()
            job.waiter.give(error)

    def _submit(self, asked: SampleRequest, order: int, waiter: _Waiter) -> None:
        try:
            self._validate(asked)
            request = Request(asked, order=order, to_bytes=self._to_bytes)
            self._batcher.submit(request)
        except EngineError as error:
            waiter.give(error)
            return
        self._in_flight[order] = _InFlight(request, waiter)

    def _validate(self, asked: SampleRequest) -> None:
        self._weights.slot(asked.slot)
        vocab, longest = self._shape.vocab, self._shape.max_context
        wrong = [i for i in asked.ids if not 0 <= i < vocab]
        if wrong:
            raise EngineError(f"token id {wrong[0]} is outside the vocabulary of {vocab}.")
        if asked.media:
            raise EngineError("this model reads no media.", "send text only")
        if len(asked.ids) + asked.sampling.max_tokens > longest:
            raise EngineError(
                f"{len(asked.ids)} prompt and {asked.sampling.max_tokens} new tokens are more than "
                f"the model's context of {longest}.", "lower the limits of the task"
            )  # fmt: skip

    def _abort(self, order: int) -> None:
        if (left := self._in_flight.pop(order, None)) is not None:
            self._batcher.abort(left.request)

    def _drop(self, kind: Work, job: _Job) -> None:
        """Close a generator that nobody awaits any more."""
        if job in self._jobs[kind]:
            self._jobs[kind].remove(job)
            job.items.close()

    def _fail_requests(self, error: EngineError) -> None:
        with self._counting:
            for left in self._in_flight.values():
                self._batcher.abort(left.request)
            for slot, version in self._weights.versions.items():  # what was planned is not there
                self._batcher.renew(slot, version=version)
        for left in self._in_flight.values():
            left.waiter.give(error)
        self._in_flight.clear()

    def _pinning(self, slot: str) -> Generator[None, None, int]:
        version = self._weights.pin(slot)
        self._batcher.renew(slot, version=version)
        return version
        yield
