"""Engine against plain full passes: what is sampled is what the model says, however it is run."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from posttrain.core.ports import Work
from posttrain.engine.model import AnyDecoder, load, load_tokenizer, random_model, skeleton_over
from posttrain.engine.text import token_bytes
from tests.engine.asking import (
    ask,
    engine,
    logits_by_full_pass,
    sample_all,
    worst_difference,
)

THREE, SEVEN = (5, 6, 7), (11, 12, 13, 14, 15, 16, 17)


@pytest.fixture(scope="module")
def model(tiny: Path) -> AnyDecoder:
    return load(tiny, dtype=torch.float32)


@pytest.fixture(scope="module")
def exact(tiny: Path) -> AnyDecoder:
    """The same in float64."""
    wide = load(tiny, dtype=torch.float32)
    for parameter in wide.parameters():
        parameter.data = parameter.data.double()
    return wide


def mixed_requests(seed: int = 0) -> list:
    """Groups of three on prompts of many lengths, around the block border too, some of which begin
    alike.
    """
    chance = random.Random(seed)
    prompts = [[chance.randrange(3, 300) for _ in range(n)] for n in (1, 3, 7, 15, 16, 17, 40)]
    prompts += [[*prompts[-1][:alike], 5, 6, 7] for alike in (15, 16, 33, 40)]
    return [
        ask(prompt, seed=index * 10 + member, max_tokens=chance.randrange(1, 30),
            temperature=chance.choice((0.7, 1.0, 1.3)))
        for index, prompt in enumerate(prompts) for member in range(3)
    ]  # fmt: skip


WAYS = [
    pytest.param({}, id="batched and shared"),
    pytest.param({"max_batch": 1}, id="one by one"),
    pytest.param({"max_step_tokens": 5, "max_batch": 5}, id="prefilled in chunks"),
    pytest.param({"cache_tokens": 112, "max_batch": 8}, id="put back and computed again"),
]


@pytest.mark.parametrize("way", WAYS)
def test_logprobs_equal_a_full_pass_in_float64(exact, way):
    """Finds errors of logic: nothing but rounding may differ."""
    requests = mixed_requests()
    for request, sampled in zip(requests, sample_all(exact, requests, **way), strict=True):
        assert worst_difference(exact, request, sampled) < 1e-10


@pytest.mark.parametrize("way", WAYS)
def test_logprobs_equal_a_full_pass_in_float32(model, way):
    requests = mixed_requests()
    for request, sampled in zip(requests, sample_all(model, requests, **way), strict=True):
        assert worst_difference(model, request, sampled) < 5e-5


def test_tokens_do_not_depend_on_neighbours_chunks_or_memory(exact):
    requests = mixed_requests(seed=1)
    expected = [sampled.ids for sampled in sample_all(exact, requests, max_batch=1)]
    for way in ({}, {"max_step_tokens": 5, "max_batch": 5}, {"cache_tokens": 112}):
        assert [s.ids for s in sample_all(exact, requests, **way)] == expected
    backwards = sample_all(exact, requests[::-1])
    assert [s.ids for s in backwards[::-1]] == expected


def test_the_tight_memory_of_these_tests_does_put_requests_back(model):
    async def body() -> int:
        with engine(model, cache_tokens=112, max_batch=8) as running:
            await asyncio.gather(*[running.sample(r) for r in mixed_requests()])
            return running.stats().requests.puts_back

    assert asyncio.run(body()) > 0


def test_short_and_long_prompts_together_equal_each_alone(model):
    """BR-12: positions of a shorter row shifted with the padding of its batch. There is no left
    padding here, hence no mask [0,0,0,0,1,1,1]: a row's positions are 0, 1, 2, … beside whatever
    else is computed. Compared are alone and together, with the cache and by a pass without one.
    """
    requests = [ask(ids, temperature=0.0, max_tokens=12) for ids in (THREE, SEVEN)]
    together = sample_all(model, requests)
    for request, batched in zip(requests, together, strict=True):
        (alone,) = sample_all(model, [request])
        assert alone.ids == batched.ids
        assert alone.logprobs == pytest.approx(batched.logprobs, abs=1e-5)
        assert worst_difference(model, request, batched) < 1e-5
        logits = logits_by_full_pass(model, (*request.ids, *batched.ids))
        greedy = logits[len(request.ids) - 1 : -1].argmax(-1)
        assert tuple(greedy.tolist()) == batched.ids


def test_a_group_computes_its_prompt_once(model):
    everyone_asked = threading.Event()

    def hold() -> Generator[None, None, None]:
        everyone_asked.wait(timeout=30)
        yield

    async def body():
        with engine(model) as running:
            holding = asyncio.create_task(running.run(Work.TRAIN, hold()))
            group = [
                asyncio.create_task(running.sample(ask(range(40, 70), seed=i, max_tokens=1)))
                for i in range(8)
            ]
            await asyncio.sleep(0)
            everyone_asked.set()
            await asyncio.gather(holding, *group)
            return running.stats().requests

    counts = asyncio.run(body())
    assert counts.computed_tokens == 30
    assert counts.shared_tokens == 7 * 30


def test_what_requests_have_in_common_is_computed_once_and_a_next_turn_goes_on_from_it(model):
    system = [(7 * i) % 250 + 3 for i in range(35)]
    first, second = ask([*system, 1, 2], max_tokens=20), ask([*system, 4], seed=1, max_tokens=4)

    async def body():
        with engine(model) as running:
            turn, _ = await asyncio.gather(running.sample(first), running.sample(second))
            before = running.stats()
            longer = ask([*first.ids, *turn.ids, 9, 9, 9], seed=2, max_tokens=4)
            again = await running.sample(longer)
            return longer, again, before, running.stats()

    longer, again, before, after = asyncio.run(body())
    assert before.requests.shared_tokens == 32
    assert after.requests.shared_tokens - before.requests.shared_tokens == 48  # of 37 + 20 + 3
    assert after.blocks.free == after.blocks.total
    assert worst_difference(model, longer, again) < 5e-5


def test_members_with_different_seeds_differ_and_equal_seeds_agree(model):
    """BR-55: the seed was copied to every choice."""
    asked = [ask(SEVEN, seed=seed, max_tokens=20) for seed in (1, 2, 3, 1)]
    ids = [sampled.ids for sampled in sample_all(model, asked)]
    assert len(set(ids)) == 3
    assert ids[0] == ids[3]


def test_a_stop_string_ends_a_request_inside_the_engine(tiny, model):
    tokenizer = load_tokenizer(tiny)
    free = sample_all(model, [ask(SEVEN, seed=4, max_tokens=30)])[0]
    to_bytes = token_bytes(tokenizer)
    cut = next(n for n in range(4, 30) if len(to_bytes(free.ids[n])) == 1
               and to_bytes(free.ids[n]).isascii())  # fmt: skip
    stop = b"".join(map(to_bytes, free.ids[cut - 1 : cut + 1])).decode(errors="replace")
    asked = ask(SEVEN, seed=4, max_tokens=30, stop_strings=(stop,))
    stopped = sample_all(model, [asked], to_bytes=to_bytes)[0]
    assert stopped.finish == "stop"
    assert stopped.ids == free.ids[: len(stopped.ids)]
    assert stop in b"".join(map(to_bytes, stopped.ids)).decode(errors="replace")


@pytest.mark.parametrize("family", ["gpt_neox", "qwen3"])
def test_other_architectures_sample_what_they_say(family, tmp_path):
    random_model(tmp_path, family=family, seed=2, initializer_range=0.1)
    decoder = load(tmp_path, dtype=torch.float32)
    requests = mixed_requests(seed=3)[:12]
    for request, sampled in zip(requests, sample_all(decoder, requests), strict=True):
        assert worst_difference(decoder, request, sampled) < 5e-5


def test_bfloat16_gives_a_stream_the_same_tokens_alone_and_in_a_batch(tiny):
    narrow = load(tiny, dtype=torch.bfloat16)
    requests = [ask(SEVEN, seed=i, max_tokens=16) for i in range(6)]
    together = sample_all(narrow, requests)
    alone = [sample_all(narrow, [request])[0] for request in requests]
    assert [s.ids for s in together] == [s.ids for s in alone]


def test_an_update_in_flight_tags_versions_and_is_never_shared(tiny):
    """Mode keep: requests go on over their own old keys; new ones never see those."""
    trained = load(tiny, dtype=torch.float32)
    skeleton = skeleton_over(trained)

    async def body():
        with engine(skeleton, version=3) as running:
            old = asyncio.create_task(running.sample(ask(SEVEN, seed=1, max_tokens=400)))
            while running.stats().requests.sampled_tokens < 3:
                await asyncio.sleep(0)
            with torch.no_grad():
                trained.norm.mul_(1.7)
            await running.publish(version=4, parent=3)
            new = await running.sample(ask(SEVEN, seed=1, max_tokens=6))
            return await old, new, running.stats().requests.shared_tokens

    old, new, shared = asyncio.run(body())
    assert set(old.versions) == {3, 4}
    assert list(old.versions) == sorted(old.versions)
    assert set(old.kv_versions) == {3}
    assert set(new.versions) == set(new.kv_versions) == {4}
    assert shared == 0
    assert worst_difference(trained, ask(SEVEN), new) < 5e-5


def test_a_pinned_slot_keeps_its_version_while_training_goes_on(tiny):
    trained = load(tiny, dtype=torch.float32)
    greedy = ask(SEVEN, temperature=0.0, max_tokens=10)
    pinned_greedy = ask(SEVEN, temperature=0.0, max_tokens=10, slot="eval")

    async def body():
        with engine(skeleton_over(trained)) as running:
            before = await running.sample(greedy)
            assert await running.pin("eval") == 0
            with torch.no_grad():
                trained.embed.copy_(trained.embed.flip(0))
            await running.publish(version=1, parent=0)
            newest, pinned = await asyncio.gather(
                running.sample(greedy), running.sample(pinned_greedy)
            )
            return before, newest, pinned, running.stats().versions

    before, newest, pinned, versions = asyncio.run(body())
    assert pinned.ids == before.ids
    assert set(pinned.versions) == {0}
    assert newest.ids != before.ids
    assert versions == {"train": 1, "eval": 0}
