from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from posttrain.core.clock import ManualClock
from posttrain.core.errors import EngineError
from posttrain.core.ports import Policy
from posttrain.engine.scripted import ScriptedPolicy
from tests.engine.asking import ask


def sample(policy: ScriptedPolicy, *requests):
    async def body():
        return [await policy.sample(request) for request in requests]

    return asyncio.run(body())


def test_replies_come_in_order_and_the_last_one_stays():
    policy = ScriptedPolicy(["a", [7, 8]])
    assert [s.ids for s in sample(policy, *[ask([1])] * 3)] == [(97,), (7, 8), (7, 8)]
    assert isinstance(policy, Policy)
    assert len(policy.asked) == 3


def test_a_function_answers_by_request():
    policy = ScriptedPolicy(lambda request: [sum(request.ids)])
    assert [s.ids for s in sample(policy, ask([1, 2]), ask([5]))] == [(3,), (5,)]


def test_every_column_has_one_plausible_entry_a_token():
    (sampled,) = sample(ScriptedPolicy(["hello"], version=4), ask([1]))
    assert len(sampled.logprobs) == 5
    assert all(-2.0 <= logprob <= 0.0 for logprob in sampled.logprobs)
    assert sampled.versions == sampled.kv_versions == (4,) * 5


def test_stop_ids_and_the_length_limit_are_kept_to():
    policy = ScriptedPolicy([[1, 2, 9, 4], [1, 2], [1, 2, 3, 4]])
    stopped, closed, cut = sample(
        policy, ask([1], stop_ids=(9,)), ask([1], stop_ids=(9,)), ask([1], max_tokens=3)
    )
    assert (stopped.ids, stopped.finish) == ((1, 2, 9), "stop")
    assert (closed.ids, closed.finish) == ((1, 2, 9), "stop")
    assert (cut.ids, cut.finish) == ((1, 2, 3), "length")


def test_a_scripted_failure_is_raised():
    with pytest.raises(EngineError, match="gone"):
        sample(ScriptedPolicy([EngineError("gone")]), ask([1]))


def test_latency_passes_on_the_clock_alone():
    clock = ManualClock(auto_jump=True)
    sample(ScriptedPolicy(["a"], clock=clock, latency_s=60.0), ask([1]), ask([1]))
    assert clock.now_s() == 120.0


def test_published_versions_are_those_of_later_tokens():
    policy = ScriptedPolicy(["a"])

    async def body():
        await policy.publish(version=2, parent=0)
        with pytest.raises(EngineError):
            await policy.publish(version=2, parent=0)
        return await policy.sample(ask([1]))

    assert asyncio.run(body()).versions == (2,)


def test_it_needs_no_torch():
    program = "import posttrain.engine.scripted, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
