"""The state machine of one sampling request.

It knows its tokens, what has been computed of them, under which weight versions, and when it must
stop. It is not a scheduler (`engine.batcher`) and owns no blocks beyond the table it is given. The
one thing that must stay true: ids, log-probabilities and versions of the sampled tokens always
have one entry per token.
"""

from __future__ import annotations

from enum import StrEnum

from posttrain.core.errors import EngineError, IllegalTransitionError
from posttrain.core.ports import SampleRequest
from posttrain.core.trajectory import FinishReason, Sampled
from posttrain.engine.text import Detokenizer, StopWatch, TokenBytes


class State(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    """Owns no blocks: new, or put back to be computed again."""
    PREFILLING = "prefilling"
    """Owns blocks; known tokens are still to be computed before the next can be sampled."""
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILLING, State.ABORTED}),
    State.PREFILLING: frozenset({State.DECODING, State.FINISHED, State.WAITING, State.ABORTED}),
    State.DECODING: frozenset({State.FINISHED, State.WAITING, State.ABORTED}),
    State.FINISHED: frozenset(),
    State.ABORTED: frozenset(),
}
RUNNING = frozenset({State.PREFILLING, State.DECODING})


class Request:
    """One request and everything sampled for it.

    `order` is the running number of its arrival. `to_bytes` is needed for stop strings only.

    Raises:
        EngineError: there are no ids, no token may be sampled, or stop strings are asked for and
            nobody says what a token's text is.
    """

    def __init__(
        self, asked: SampleRequest, *, order: int, to_bytes: TokenBytes | None = None
    ) -> None:
        sampling = asked.sampling
        if not asked.ids:
            raise EngineError("a request without ids.", "send at least one prompt token")
        if sampling.max_tokens < 1:
            raise EngineError(f"max_tokens is {sampling.max_tokens}.", "ask for at least one token")
        if sampling.stop_strings and to_bytes is None:
            raise EngineError("stop strings need a tokenizer.", "give the engine `to_bytes`")
        self.asked, self.sampling, self.order = asked, sampling, order
        self.state = State.WAITING
        self.tokens: list[int] = list(asked.ids)
        self.num_prompt = len(asked.ids)
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.kv_versions: list[int] = []
        self.blocks: list[int] = []
        self.computed = 0
        """Leading tokens whose keys and values are in `blocks`."""
        self.oldest_kv: int | None = None
        """Oldest version among them; None while nothing is computed."""
        self.finish: FinishReason | None = None
        self.puts_back = 0
        self._stop_ids = frozenset(sampling.stop_ids)
        self._text: Detokenizer | None = None
        if sampling.stop_strings and to_bytes is not None:
            self._text, self._watch = Detokenizer(to_bytes), StopWatch(sampling.stop_strings)

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def pending(self) -> int:
        """Known tokens that are not computed yet; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def urgency(self) -> tuple[int, int]:
        """Sort key: lane first, then arrival; smaller goes first."""
        return self.asked.lane.rank, self.order

    def move(self, state: State) -> None:
        """Change state, or raise `IllegalTransitionError` with the request's story."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(
                f"request {self.order} ('{self.asked.key}', lane {self.asked.lane}) cannot go from "
                f"{self.state} to {state}: {self.num_sampled} of {self.sampling.max_tokens} tokens "
                f"sampled, {self.computed} computed, {self.puts_back} times put back."
            )
        self.state = state

    def compute(self, count: int, *, version: int) -> None:
        """`count` further tokens were computed under `version`."""
        assert 0 < count <= self.pending, f"{count} computed, {self.pending} pending"
        self.computed += count
        self.oldest_kv = version if self.oldest_kv is None else min(self.oldest_kv, version)

    def accept(self, token: int, logprob: float, *, version: int) -> None:
        """A token was sampled under `version`; finishes the request where it must stop."""
        assert self.oldest_kv is not None, "sampled from nothing"
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.kv_versions.append(self.oldest_kv)
        if self._stops(token):
            self._end(State.FINISHED, FinishReason.STOP)
        elif self.num_sampled >= self.sampling.max_tokens:
            self._end(State.FINISHED, FinishReason.LENGTH)
        elif self.state is State.PREFILLING:
            self.move(State.DECODING)

    def put_back(self) -> None:
        """Forget what was computed; what was sampled stays. The caller releases the blocks."""
        self.move(State.WAITING)
        self.computed, self.oldest_kv = 0, None
        self.puts_back += 1

    def abort(self) -> None:
        """End the request from outside."""
        self._end(State.ABORTED, FinishReason.ABORTED)

    def result(self) -> Sampled:
        """What was sampled; only for a request that has ended."""
        assert self.finish is not None, f"request {self.order} is {self.state}"
        return Sampled(
            ids=tuple(self.tokens[self.num_prompt :]),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            kv_versions=tuple(self.kv_versions),
            finish=self.finish,
        )

    def check(self) -> None:
        """Assert the invariants."""
        lengths = {len(self.logprobs), len(self.versions), len(self.kv_versions), self.num_sampled}
        assert len(lengths) == 1, f"columns of unequal length: {lengths}"
        assert 0 <= self.computed <= len(self.tokens)
        assert (self.computed == 0) == (self.oldest_kv is None)
        assert (self.finish is not None) == (self.state in (State.FINISHED, State.ABORTED))
        if self.state is State.DECODING:
            assert self.pending == 1, f"decoding with {self.pending} tokens to compute"
        if self.state not in RUNNING:
            assert not self.blocks, f"{self.state} request owns blocks"

    def _stops(self, token: int) -> bool:
        seen = self._text is not None and self._watch.push(self._text.push(token))
        return seen or token in self._stop_ids

    def _end(self, state: State, finish: FinishReason) -> None:
        self.move(state)
        self.finish = finish
