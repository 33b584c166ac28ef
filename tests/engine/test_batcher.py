from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import EngineError
from posttrain.core.task import Lane
from posttrain.engine.batcher import Batcher, Draw, Step
from posttrain.engine.blocks import Blocks
from posttrain.engine.request import Request, State
from tests.engine.asking import ask

SIZE = 4


def batcher(*, blocks: int = 64, max_batch: int = 4, max_step_tokens: int = 16) -> Batcher:
    made = Batcher(Blocks(blocks, size=SIZE), max_batch=max_batch, max_step_tokens=max_step_tokens)
    for slot in ("train", "eval"):
        made.renew(slot, version=0)
    return made


class Device:
    """Plays the model: keeps in each block which sequence's tokens were written there, and checks
    at each step that everyone would read exactly their own.
    """

    def __init__(self, batcher: Batcher, num_blocks: int) -> None:
        self.batcher = batcher
        self.memory: list[list[object]] = [[None] * SIZE for _ in range(num_blocks)]
        self.versions = {"train": 0, "eval": 0}

    def update(self, slot: str) -> None:
        self.versions[slot] += 1
        self.batcher.renew(slot, version=self.versions[slot])

    def run(self, step: Step) -> list[Request]:
        for copy in step.copies:
            self.memory[copy.target] = list(self.memory[copy.source])
        for chunk in step.chunks:
            self.write(chunk.request, chunk.first, chunk.last)
        for chunk in step.chunks:
            current = self.versions[step.slot]
            shared = [self.entry(chunk.request, p)[1] for p in range(chunk.request.computed)]
            assert min(shared, default=current) == min(
                current if chunk.request.oldest_kv is None else chunk.request.oldest_kv, current
            )
            for request in (chunk.request, *chunk.samplers):
                self.read(request, chunk.last)
        draws = [Draw(self.next_token(request), -1.0) for request in step.samplers]
        ended = self.batcher.finish(step, draws)
        for request in self.batcher.requests():
            entries = [self.entry(request, p) for p in range(request.computed)]
            assert request.oldest_kv == min((version for _, version in entries), default=None)
        return ended

    def entry(self, request: Request, position: int) -> tuple[tuple[int, ...], int]:
        return self.memory[request.blocks[position // SIZE]][position % SIZE]  # type: ignore[return-value]

    def write(self, request: Request, first: int, last: int) -> None:
        for p in range(first, last):
            entry = (tuple(request.tokens[: p + 1]), self.versions[request.asked.slot])
            self.memory[request.blocks[p // SIZE]][p % SIZE] = entry

    def read(self, request: Request, last: int) -> None:
        for p in range(last):
            assert self.entry(request, p)[0] == tuple(request.tokens[: p + 1]), f"foreign at {p}"

    @staticmethod
    def next_token(request: Request) -> int:
        return hash((*request.tokens, request.sampling.seed)) % 50

    def drain(self) -> None:
        while (step := self.batcher.plan()) is not None:
            self.run(step)
            self.batcher.check()


def test_a_groups_prompt_is_computed_once_and_all_sample_in_the_same_step():
    machine = batcher(max_batch=8)
    group = [Request(ask(range(10), seed=i), order=i) for i in range(4)]
    for request in group:
        machine.submit(request)
    step = machine.plan()
    assert step is not None
    assert [(c.first, c.last) for c in step.chunks] == [(0, 10)]
    assert step.samplers == tuple(group)
    Device(machine, 64).drain()
    assert machine.stats().shared_tokens == 30


def test_a_late_member_of_a_group_computes_only_the_prompts_last_token():
    machine = batcher()
    device = Device(machine, 64)
    machine.submit(Request(ask(range(10), seed=0), order=0))
    for _ in range(3):
        device.run(machine.plan())  # type: ignore[arg-type]
    late = Request(ask(range(10), seed=1), order=1)
    machine.submit(late)
    step = machine.plan()
    assert [(c.first, c.last) for c in step.chunks if c.request is late] == [(9, 10)]
    device.run(step)
    machine.check()
    device.drain()
    assert late.finish is not None


def test_prompts_that_begin_alike_share_full_blocks_from_the_same_step_on():
    machine = batcher(max_step_tokens=64)
    device = Device(machine, 64)
    requests = [Request(ask([*range(10), 90 + i], seed=i), order=i) for i in range(3)]
    for request in requests:
        machine.submit(request)
    step = machine.plan()
    assert [(c.first, c.last) for c in step.chunks] == [(0, 11), (8, 11), (8, 11)]
    device.run(step)
    device.drain()
    assert machine.stats().shared_tokens == 16
    later = Request(ask(requests[0].tokens[:15], seed=9), order=3)
    machine.submit(later)
    step = machine.plan()
    assert [(c.first, c.last) for c in step.chunks] == [(12, 15)], "what ended is found again"
    device.run(step)
    device.update("train")
    machine.submit(Request(ask([*range(10)]), order=4))
    assert [c.first for c in machine.plan().chunks if c.request.order == 4] == [0]


def test_what_is_remembered_makes_room_for_what_is_needed():
    machine = batcher(blocks=6)
    device = Device(machine, 6)
    for order in range(5):
        machine.submit(Request(ask([order] * 9, max_tokens=8), order=order))
        device.drain()
    again = Request(ask([4] * 9, max_tokens=8), order=9)
    machine.submit(again)
    assert [c.first for c in machine.plan().chunks] == [8]


def test_followers_wait_while_their_leader_prefills_in_chunks():
    machine = batcher(max_step_tokens=4)
    leader, follower = (Request(ask(range(10), seed=i), order=i) for i in range(2))
    machine.submit(leader)
    machine.submit(follower)
    device = Device(machine, 64)
    for expected in ((0, 4), (4, 8)):
        step = machine.plan()
        assert [(c.first, c.last, c.samplers) for c in step.chunks] == [(*expected, ())]
        device.run(step)
        assert follower.state is State.WAITING
    step = machine.plan()
    assert step.samplers == (leader, follower)


def test_nothing_computed_before_an_update_is_shared_after_it():
    machine = batcher(max_step_tokens=4)
    device = Device(machine, 64)
    leader = Request(ask(range(10), seed=0), order=0)
    machine.submit(leader)
    device.run(machine.plan())  # type: ignore[arg-type]
    device.update("train")
    late = Request(ask(range(10), seed=1), order=1)
    machine.submit(late)
    device.drain()
    assert machine.stats().shared_tokens == 0
    assert set(leader.kv_versions) == {0}
    assert set(leader.versions) == {1}
    assert set(late.kv_versions) == {1}


def test_decodes_come_first_and_prefills_take_the_rest_of_the_budget():
    machine = batcher(max_step_tokens=8)
    device = Device(machine, 64)
    machine.submit(Request(ask([1]), order=0))
    device.run(machine.plan())  # type: ignore[arg-type]
    machine.submit(Request(ask(range(20)), order=1))
    step = machine.plan()
    assert [(c.request.order, c.last - c.first) for c in step.chunks] == [(0, 1), (1, 7)]


def test_a_more_urgent_lane_is_admitted_first():
    machine = batcher(max_batch=1)
    machine.submit(Request(ask([1], lane=Lane.TRAIN), order=0))
    machine.submit(Request(ask([2], lane=Lane.SERVE), order=1))
    step = machine.plan()
    assert [c.request.order for c in step.chunks] == [1]


def test_a_step_holds_one_slots_requests_and_other_slots_get_theirs():
    machine = batcher(max_batch=1)
    requests = [Request(ask([1], slot=slot), order=i) for i, slot in enumerate(("train", "eval"))]
    for request in requests:
        machine.submit(request)
    device = Device(machine, 64)
    step = machine.plan()
    assert step.slot == "train"
    device.run(step)
    device.drain()
    assert all(request.finish is not None for request in requests)


def test_out_of_blocks_the_youngest_is_put_back_and_still_gets_its_tokens():
    requests = [Request(ask([i] * 4, seed=i, max_tokens=20), order=i) for i in range(4)]
    alone = {}
    for i in range(4):
        single = Request(ask([i] * 4, seed=i, max_tokens=20), order=i)
        machine = batcher()
        machine.submit(single)
        Device(machine, 64).drain()
        alone[i] = single.result().ids
    machine = batcher(blocks=9)
    for request in requests:
        machine.submit(request)
    Device(machine, 9).drain()
    assert machine.stats().puts_back > 0
    assert requests[0].puts_back == 0
    assert {r.order: r.result().ids for r in requests} == alone


def test_a_request_that_could_never_be_held_is_refused():
    with pytest.raises(EngineError, match="needs 6 blocks, the engine has 5"):
        batcher(blocks=5).submit(Request(ask(range(10), max_tokens=11), order=0))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_interleaving_keeps_every_count_and_everyones_tokens(seed: int):
    """Random submissions, aborts, updates and tight memory; blocks recounted at each step."""
    chance = random.Random(seed)
    num_blocks = chance.randrange(8, 30)
    machine = batcher(
        blocks=num_blocks, max_batch=chance.randrange(1, 6), max_step_tokens=chance.randrange(6, 20)
    )
    device = Device(machine, num_blocks)
    requests: list[Request] = []
    for order in range(chance.randrange(1, 16)):
        for _ in range(chance.randrange(3)):
            if (step := machine.plan()) is not None:
                device.run(step)
                machine.check()
        action = chance.random()
        if action < 0.15 and requests:
            machine.abort(chance.choice(requests))
        elif action < 0.25:
            device.update(chance.choice(("train", "eval")))
        prompt = [chance.randrange(2)] * chance.choice((1, 3, 4, 9))
        asked = ask(prompt, seed=order, max_tokens=chance.randrange(1, 14),
                    slot=chance.choice(("train", "train", "eval")),
                    lane=chance.choice((Lane.TRAIN, Lane.EVAL)))  # fmt: skip
        requests.append(Request(asked, order=order))
        machine.submit(requests[-1])
        machine.check()
    device.drain()
    assert machine.stats().running == machine.stats().waiting == 0
    for request in requests:
        assert request.finish is not None
        assert request.state is State.ABORTED or request.num_sampled >= 1
        assert all(kv <= v for kv, v in zip(request.kv_versions, request.versions, strict=True))
