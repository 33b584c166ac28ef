"""A policy that says what it is told: the test double of every engine, without torch.

It follows `Policy` and `WeightSink` to the letter (stop ids, length, versions, one entry a token),
so that loops, rollouts and gateways can be tested in milliseconds. It models no language. The one
thing that must stay true: equal requests in equal order get equal answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posttrain.core import seeds
from posttrain.core.errors import EngineError
from posttrain.core.ports import Clock, SampleRequest
from posttrain.core.trajectory import FinishReason, Sampled

Reply = str | Sequence[int] | Exception
"""Text (encoded by `encode`), ids, or what to raise."""
Encode = Callable[[str], Sequence[int]]


class ScriptedPolicy:
    """Answers from a list (in order, the last for ever) or from a function of the request.

    The first stop id of a request is put behind a reply that has none. `latency_s` passes on
    `clock` before each answer.

    >>> import asyncio
    >>> from posttrain.core.trajectory import Sampling
    >>> request = SampleRequest(ids=(1,), sampling=Sampling(stop_ids=(0,)))
    >>> asyncio.run(ScriptedPolicy(["hi"]).sample(request)).ids
    (104, 105, 0)
    """

    def __init__(
        self,
        script: Sequence[Reply] | Callable[[SampleRequest], Reply],
        *,
        encode: Encode = lambda text: text.encode(),
        clock: Clock | None = None,
        latency_s: float = 0.0,
        version: int = 0,
    ) -> None:
        assert callable(script) or script, "an empty script"
        assert clock is not None or not latency_s, "latency passes on a clock"
        self._script, self._encode = script, encode
        self._clock, self._latency_s = clock, latency_s
        self.version = version
        self.asked: list[SampleRequest] = []
        """Every request so far, in order of arrival."""

    async def sample(self, request: SampleRequest) -> Sampled:
        """See `Policy`."""
        self.asked.append(request)
        reply = self._reply(request, len(self.asked) - 1)
        if self._clock is not None:
            await self._clock.sleep(self._latency_s)
        if isinstance(reply, Exception):
            raise reply
        return self._sampled(request, self._encode(reply) if isinstance(reply, str) else reply)

    async def publish(self, *, version: int, parent: int) -> None:
        """See `WeightSink`."""
        if version <= self.version:
            raise EngineError(f"version {version} was published after {self.version}.")
        self.version = version

    def _reply(self, request: SampleRequest, index: int) -> Reply:
        if callable(self._script):
            return self._script(request)
        return self._script[min(index, len(self._script) - 1)]

    def _sampled(self, request: SampleRequest, reply: Sequence[int]) -> Sampled:
        sampling, ids = request.sampling, list(reply)
        stops = [index for index, token in enumerate(ids) if token in sampling.stop_ids]
        if stops:
            ids = ids[: stops[0] + 1]
        elif sampling.stop_ids:
            ids.append(sampling.stop_ids[0])
        finish = FinishReason.STOP if len(ids) <= sampling.max_tokens else FinishReason.LENGTH
        ids = ids[: sampling.max_tokens]
        name = f"{request.key}/{sampling.seed}"
        return Sampled(
            ids=tuple(ids),
            logprobs=tuple(-2.0 * seeds.unit(name, index, i) for index, i in enumerate(ids)),
            versions=(self.version,) * len(ids),
            kv_versions=(self.version,) * len(ids),
            finish=finish,
        )
