"""Continuous batching: what the next engine step computes, for whom, in which blocks.

One token budget a step: every decoding request of the slot gets one token, the rest goes to
prefills. Requests with the same prompt ids in the same slot share it: while the first prefills, the
others wait and then sample from its last position; later ones fork its blocks and compute only the
prompt's last token. Requests that only begin alike share the full blocks of what they have in
common, from the step on in which these are computed (a layer writes the keys and values of a step
before it looks at any), whether the first is still there or not. Out of blocks, the least urgent
running request is put back to be computed again. It decides and counts; it runs nothing. The one
thing that must stay true: blocks are shared only among requests whose keys and values all come from
the slot's current version.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from posttrain.core.errors import EngineError
from posttrain.engine.blocks import BlockCopy, Blocks
from posttrain.engine.request import RUNNING, Request, State

Prefix = tuple[str, tuple[int, ...]]
"""Slot and prompt ids."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions `first` … `last`-1 of a request are computed; `samplers` draw their next token
    from the last of them (empty while a prefill goes on).
    """

    request: Request
    first: int
    last: int
    samplers: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step. `copies` are carried out in order before anything is written; order of
    draws: chunk by chunk, sampler by sampler.
    """

    slot: str
    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...]

    @property
    def samplers(self) -> tuple[Request, ...]:
        """Everyone who draws a token, in order."""
        return tuple(request for chunk in self.chunks for request in chunk.samplers)


@dataclass(frozen=True, slots=True)
class Draw:
    """A sampled token and its processed log-probability."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherStats:
    """Counts since the start, and what stands now."""

    waiting: int
    running: int
    computed_tokens: int
    """Tokens that went through the model."""
    shared_tokens: int
    """Known tokens that did not, because another request had computed them."""
    sampled_tokens: int
    puts_back: int
    aborted: int


class Batcher:
    """See the module's docstring. `max_batch` bounds the running requests of one slot."""

    def __init__(self, blocks: Blocks, *, max_batch: int, max_step_tokens: int) -> None:
        assert max_step_tokens >= max_batch, "a step must hold a token of every running request"
        self._blocks, self._max_batch, self._max_step_tokens = blocks, max_batch, max_step_tokens
        self._waiting: dict[str, list[Request]] = {}
        self._running: dict[str, list[Request]] = {}
        self._holders: dict[Prefix, dict[int, Request]] = {}
        """Running requests whose blocks start with a prompt, all of the current version."""
        self._versions: dict[str, int] = {}
        """Slot → the version it holds."""
        self._computed = self._shared = self._sampled = self._puts_back = self._aborted = 0

    @property
    def has_work(self) -> bool:
        """True while any request is waiting or running."""
        return any(self._waiting.values()) or any(self._running.values())

    def submit(self, request: Request) -> None:
        """Take a new request.

        Raises:
            EngineError: it could not be held even if it were alone.
        """
        length = request.num_prompt + request.sampling.max_tokens
        if self._blocks.count(length) > self._blocks.total:
            raise EngineError(
                f"a request of {request.num_prompt} prompt and {request.sampling.max_tokens} new "
                f"tokens needs {self._blocks.count(length)} blocks, the engine has "
                f"{self._blocks.total}.",
                "raise engine.cache_tokens or shorten the request",
            )
        self._enqueue(request)

    def abort(self, request: Request) -> None:
        """End a request from outside; a no-op where it has ended already."""
        if request.state is State.WAITING:
            self._waiting[request.asked.slot].remove(request)
        elif request.state in RUNNING:
            self._leave(request)
        else:
            return
        request.abort()
        self._aborted += 1

    def renew(self, slot: str, *, version: int) -> None:
        """The slot has these weights now: what was computed before is never shared again."""
        self._versions[slot] = version
        self._holders = {key: kept for key, kept in self._holders.items() if key[0] != slot}
        self._blocks.forget(slot)

    def plan(self) -> Step | None:
        """The next step, or None where no request can be moved. Blocks are taken here."""
        for slot in sorted(self._slots(), key=self._most_urgent):
            plan = _Plan(slot=slot, budget=self._max_step_tokens)
            self._plan_decodes(plan)
            self._plan_prefills(plan)
            self._plan_admissions(plan)
            if plan.chunks:
                return Step(slot, tuple(plan.chunks), tuple(plan.copies))
        return None

    def finish(self, step: Step, draws: Sequence[Draw]) -> list[Request]:
        """A step was run; returns the requests that ended with it."""
        assert len(draws) == len(step.samplers), f"{len(draws)} draws, {len(step.samplers)} wanted"
        version = self._versions[step.slot]
        remaining, ended = iter(draws), []
        for chunk in step.chunks:
            self._computed += chunk.last - chunk.first
            chunk.request.compute(chunk.last - chunk.first, version=version)
            for request in chunk.samplers:
                if request is not chunk.request:
                    request.compute(request.num_prompt, version=version)
                draw = next(remaining)
                request.accept(draw.token, draw.logprob, version=version)
                if request.state is State.FINISHED:
                    ended.append(request)
        self._sampled += len(draws)
        for request in ended:
            self._leave(request)
        return ended

    def requests(self) -> list[Request]:
        """Every request that has not ended."""
        return [r for group in (self._waiting, self._running) for rs in group.values() for r in rs]

    def check(self) -> None:
        """Assert the invariants; recounts all blocks."""
        for slot, running in self._running.items():
            assert len(running) <= self._max_batch
            assert all(r.state in RUNNING and r.asked.slot == slot for r in running)
        for waiting in self._waiting.values():
            assert all(r.state is State.WAITING for r in waiting)
            assert waiting == sorted(waiting, key=lambda r: r.urgency)
        for request in self.requests():
            request.check()
        held = {order: r for holders in self._holders.values() for order, r in holders.items()}
        assert all(r.state in RUNNING for r in held.values()), "an ended request holds a prefix"
        self._blocks.check(r.blocks for r in self.requests())

    def stats(self) -> BatcherStats:
        """Current counts."""
        return BatcherStats(
            waiting=sum(map(len, self._waiting.values())),
            running=sum(map(len, self._running.values())),
            computed_tokens=self._computed, shared_tokens=self._shared,
            sampled_tokens=self._sampled, puts_back=self._puts_back, aborted=self._aborted,
        )  # fmt: skip

    # --- planning -----------------------------------------------------------------------------

    def _slots(self) -> Iterable[str]:
        groups = (*self._running.items(), *self._waiting.items())
        return {slot for slot, requests in groups if requests}

    def _most_urgent(self, slot: str) -> tuple[int, int]:
        waiting = self._waiting.get(slot, [])[:1]
        return min(r.urgency for r in (*self._running.get(slot, ()), *waiting))

    def _plan_decodes(self, plan: _Plan) -> None:
        decoding = [r for r in self._running.get(plan.slot, ()) if r.state is State.DECODING]
        for request in sorted(decoding, key=lambda r: r.urgency):
            last = request.computed + 1
            if request.state is State.DECODING and self._make_room(request, last, plan):
                self._compute(request, last, plan)

    def _plan_prefills(self, plan: _Plan) -> None:
        prefilling = [r for r in self._running.get(plan.slot, ()) if r.state is State.PREFILLING]
        for request in sorted(prefilling, key=lambda r: r.urgency):
            if plan.budget:
                self._compute(request, len(request.tokens), plan)

    def _plan_admissions(self, plan: _Plan) -> None:
        running = self._running.setdefault(plan.slot, [])
        for request in list(self._waiting.get(plan.slot, ())):
            if not plan.budget or len(running) >= self._max_batch:
                return
            if request.state is not State.WAITING:
                continue  # joined a leader earlier in this loop
            holder = next(iter(self._holders.get(_prefix(request), {}).values()), None)
            if holder is not None and holder.computed < holder.num_prompt:
                continue  # its leader is at work
            if not self._admit(request, holder, plan):
                return
            self._compute(request, len(request.tokens), plan)

    def _admit(self, request: Request, holder: Request | None, plan: _Plan) -> bool:
        """Give a request the blocks of all its known tokens, if that leaves every running request
        one to grow into.
        """
        slot, last = request.asked.slot, len(request.tokens)
        if holder is None:
            table = self._blocks.adopt(slot, request.tokens[: last - 1])
            first = len(table) * self._blocks.size
        else:
            first = min(request.num_prompt, last - 1)
            table = self._blocks.fork(holder.blocks, tokens=first)
        reserve = sum(map(len, self._running.values()))
        if self._blocks.cost(table, first=first, last=last) + reserve > self._blocks.free:
            self._blocks.release(table)
            return False
        self._start(request, table)
        plan.copies += self._blocks.extend(request.blocks, first=first, last=last)
        if first:
            request.compute(first, version=self._versions[slot])
            self._shared += first
        self._holders.setdefault(_prefix(request), {})[request.order] = request
        return True

    def _compute(self, request: Request, last: int, plan: _Plan) -> None:
        """Add a chunk of the request, up to position `last` or the budget's end."""
        last = min(last, request.computed + plan.budget)
        samplers: tuple[Request, ...] = ()
        if last == len(request.tokens):
            samplers = (request, *self._join(request))
        plan.budget -= last - request.computed
        plan.chunks.append(Chunk(request, request.computed, last, samplers))
        filled = self._blocks.size * (last // self._blocks.size) > request.computed
        if filled and request.oldest_kv in (None, self._versions[plan.slot]):
            self._blocks.remember(plan.slot, request.tokens[:last], request.blocks)

    def _join(self, leader: Request) -> list[Request]:
        """Waiting requests that sample their first token from where the leader's prompt ends."""
        if leader.num_sampled or leader.order not in self._holders.get(_prefix(leader), {}):
            return []
        slot = leader.asked.slot
        room = self._max_batch - len(self._running[slot])
        same = [r for r in self._waiting.get(slot, ())
                if r.asked.ids == leader.asked.ids and not r.num_sampled][:room]  # fmt: skip
        for request in same:
            self._start(request, self._blocks.fork(leader.blocks, tokens=leader.num_prompt))
            self._shared += leader.num_prompt
            self._holders[_prefix(leader)][request.order] = request
        return same

    def _make_room(self, request: Request, last: int, plan: _Plan) -> bool:
        """Take the blocks for one more token, putting back less urgent requests where there are
        none; False if the request itself had to go.
        """
        first = request.computed
        while self._blocks.cost(request.blocks, first=first, last=last) > self._blocks.free:
            running = [r for rs in self._running.values() for r in rs]
            victim = max(running, key=lambda r: r.urgency)
            self._leave(victim)
            victim.put_back()
            self._enqueue(victim)
            self._puts_back += 1
            if victim is request:
                return False
        plan.copies += self._blocks.extend(request.blocks, first=first, last=last)
        return True

    # --- membership ---------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        waiting = self._waiting.setdefault(request.asked.slot, [])
        bisect.insort(waiting, request, key=lambda r: r.urgency)

    def _start(self, request: Request, table: list[int]) -> None:
        slot = request.asked.slot
        self._waiting[slot].remove(request)
        self._running.setdefault(slot, []).append(request)
        request.blocks = table
        request.move(State.PREFILLING)

    def _leave(self, request: Request) -> None:
        """Out of the running: blocks given up, prefix no longer held."""
        self._running[request.asked.slot].remove(request)
        self._blocks.release(request.blocks)
        holders = self._holders.get(_prefix(request), {})
        holders.pop(request.order, None)
        if not holders:
            self._holders.pop(_prefix(request), None)


@dataclass(slots=True)
class _Plan:
    """A step while it is made."""

    slot: str
    budget: int
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)


def _prefix(request: Request) -> Prefix:
    return request.asked.slot, request.asked.ids
