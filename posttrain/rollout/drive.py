"""Carrying out an attempt's instructions: what all executors share.

It decides nothing; `attempt` does. The one thing that must stay true: whatever goes wrong at the
policy port reaches the attempt as `Failed`; only cancellation leaves `_sample` as an exception.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from posttrain.core import seeds
from posttrain.core.errors import PosttrainError
from posttrain.core.ports import AttemptRequest, Clock, Policy, SampleRequest
from posttrain.core.trajectory import Sampled, Trajectory
from posttrain.core.verdict import Outcome, StopReason
from posttrain.rollout.attempt import Attempt
from posttrain.rollout.moves import Event, Execute, Failed, Replied, Sample, Started, Stop
from posttrain.rollout.render import Renderer
from posttrain.rollout.text import clean

Execution = Callable[[Execute], Awaitable[Event]]


class Driver:
    """Plays attempts on one policy."""

    def __init__(self, policy: Policy, renderer: Renderer, clock: Clock) -> None:
        self._policy = policy
        self._renderer = renderer
        self._clock = clock

    def open(self, request: AttemptRequest) -> Attempt:
        """A new attempt."""
        return Attempt(request.task, self._renderer, max_turn_tokens=request.sampling.max_tokens)

    async def play(self, attempt: Attempt, request: AttemptRequest, execute: Execution) -> None:
        """Drive the attempt to its stop."""
        instruction = attempt.handle(Started())
        while not isinstance(instruction, Stop):
            if isinstance(instruction, Sample):
                event = await self._sample(instruction, request)
            else:
                event = await execute(instruction)
            instruction = attempt.handle(event)

    async def _sample(self, instruction: Sample, request: AttemptRequest) -> Event:
        started_s = self._clock.now_s()
        try:
            sampled = await self._policy.sample(self._request(instruction, request))
        except Exception as error:
            return Failed(error=story(error))
        problem = _problem(sampled, instruction.max_tokens)
        if problem:
            return Failed(error=problem)
        text = self._renderer.reply_text(sampled.ids)
        return Replied(sampled=sampled, text=text, duration_s=self._clock.now_s() - started_s)

    def _request(self, instruction: Sample, request: AttemptRequest) -> SampleRequest:
        """Every turn of every member has random numbers of its own, whatever the caller's seed."""
        key, wanted = request.key, request.sampling
        sampling = replace(
            wanted,
            max_tokens=instruction.max_tokens,
            stop_ids=tuple(dict.fromkeys((*self._renderer.stop_ids, *wanted.stop_ids))),
            seed=seeds.hashed(wanted.seed, key.draw, key.member, instruction.turn),
        )
        return SampleRequest(
            ids=instruction.ids,
            sampling=sampling,
            lane=request.lane,
            slot=request.slot,
            key=key.hex,
        )


def story(error: BaseException) -> str:
    """An error as a record keeps it: ours speak for themselves, foreign ones with their kind."""
    if isinstance(error, PosttrainError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def unfinished(request: AttemptRequest, outcome: Outcome, error: str) -> Trajectory:
    """The record of an attempt of which nothing else is left."""
    return Trajectory(
        key=request.key,
        task=request.task,
        stop=StopReason.ABORTED,
        outcome=outcome,
        lane=request.lane,
        tries=request.tries,
        error=clean(error),
    )


def _problem(sampled: Sampled, max_tokens: int) -> str | None:
    """How a reply breaks the contract of the policy port, or None."""
    columns = (sampled.logprobs, sampled.versions, sampled.kv_versions)
    lengths = [len(sampled.ids), *map(len, columns)]
    if len(set(lengths)) > 1:
        return f"the engine's reply has columns of unequal length: {lengths}"
    if len(sampled.ids) > max_tokens:
        return f"the engine sampled {len(sampled.ids)} tokens; at most {max_tokens} were asked for"
    return None
