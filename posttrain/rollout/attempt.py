"""The state machine of one attempt: events in, instructions out.

    NEW ──Started──▶ SAMPLING ──Replied──▶ EXECUTING ──Observed──▶ SAMPLING …
                        │                      │
                        └──────────────────────┴──▶ STOPPED  (any limit, the last reply, TimedOut,
                                                              Failed, Cancelled)

It has no clock and does no I/O: a driver carries an instruction out and feeds the result back. It
can be saved as JSON whenever an instruction is due and go on elsewhere. It judges nothing. The one
thing that must stay true: every sampled token stands in exactly one row, in order, with mask 1,
and nothing else has mask 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from posttrain.core import codec
from posttrain.core.errors import IllegalTransitionError
from posttrain.core.ports import AttemptRequest
from posttrain.core.task import Json, Task, ToolCall
from posttrain.core.trajectory import FinishReason, Row, Sampled, Trajectory, Turn
from posttrain.core.verdict import Outcome, StopReason
from posttrain.rollout import tools
from posttrain.rollout.moves import (
    Cancelled,
    Event,
    Execute,
    Failed,
    Instruction,
    Observed,
    Replied,
    Sample,
    Started,
    Stop,
    TimedOut,
)
from posttrain.rollout.render import Renderer
from posttrain.rollout.text import clean, head_and_tail

NOT_RUN = "[not run: the time limit was reached]"
"""What is recorded for calls that the time limit cut off."""


class State(StrEnum):
    """Where an attempt stands."""

    NEW = "new"
    SAMPLING = "sampling"
    EXECUTING = "executing"
    STOPPED = "stopped"


_ANY_TIME = (Failed, Cancelled)
LEGAL: Mapping[State, tuple[type[Event], ...]] = {
    State.NEW: (Started, *_ANY_TIME),
    State.SAMPLING: (Replied, *_ANY_TIME),
    State.EXECUTING: (Observed, TimedOut, *_ANY_TIME),
    State.STOPPED: _ANY_TIME,
}
"""Events that may come in each state."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """Everything an attempt has to remember; a JSON value by `core.codec`."""

    state: State = State.NEW
    rows: tuple[Row, ...] = ()
    turns: tuple[Turn, ...] = ()
    max_tokens: int = 0
    """What the pending `Sample` asks for."""
    pending: tuple[ToolCall, ...] = ()
    """Calls of the pending `Execute`."""
    answered: Mapping[str, str] = field(default_factory=dict)
    """Observations of the last turn's calls that were refused."""
    last_calls: str = ""
    streak: int = 0
    """How many turns in a row issued `last_calls`."""
    active_s: float = 0.0
    timings_s: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    stop: StopReason | None = None
    outcome: Outcome | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStats:
    """Where an attempt stands, in numbers."""

    state: State
    num_turns: int
    num_sampled: int
    num_context: int
    """Tokens of the current row."""
    streak: int
    active_s: float


class Attempt:
    """One attempt at a task. `max_turn_tokens` is the caller's cap beside the task's limits."""

    def __init__(
        self,
        task: Task,
        renderer: Renderer,
        *,
        max_turn_tokens: int,
        progress: Progress | None = None,
    ) -> None:
        self.task = task
        self._renderer = renderer
        self._max_turn_tokens = min(max_turn_tokens, task.limits.max_turn_tokens)
        self._progress = progress or Progress()
        self._format = renderer.call_format(task.description.tools)

    # --- driving ------------------------------------------------------------------------------

    def handle(self, event: Event) -> Instruction:
        """Take an event in; returns what to do next.

        Raises:
            IllegalTransitionError: this event cannot come in this state.
        """
        state = self._progress.state
        if not isinstance(event, LEGAL[state]):
            raise IllegalTransitionError(
                f"attempt at {self.task.id} got {type(event).__name__} while {state.value} "
                f"after {len(self._progress.turns)} turns; wanted one of "
                f"{', '.join(kind.__name__ for kind in LEGAL[state])}."
            )
        match event:
            case Started():
                self._start()
            case Replied():
                self._replied(event)
            case Observed() | TimedOut():
                self._executed(event)
            case Failed():
                self._cut(Outcome.INFRA_FAILED, event.error)
            case Cancelled():
                self._cut(Outcome.CANCELLED, "cancelled")
        return self.instruction

    @property
    def instruction(self) -> Instruction:
        """What is due now; the same until the next event."""
        progress = self._progress
        if progress.state is State.SAMPLING:
            ids = progress.rows[-1].ids_T
            return Sample(ids=ids, max_tokens=progress.max_tokens, turn=len(progress.turns))
        if progress.state is State.EXECUTING:
            return Execute(calls=progress.pending, timeout_s=self._time_left_s)
        if progress.stop is None:
            raise IllegalTransitionError(f"attempt at {self.task.id} was not started.")
        return Stop(reason=progress.stop)

    def _start(self) -> None:
        self._progress.rows = (Row().given(self._renderer.prompt(self.task)),)
        if self._room < 1:
            tokens = len(self._progress.rows[-1].ids_T)
            limit = self.task.limits.max_context_tokens
            self._cut(Outcome.INFRA_FAILED, f"the prompt has {tokens} tokens; at most {limit} fit")
            self._progress.stop = StopReason.CONTEXT_LIMIT
            return
        self._ask()

    def _replied(self, event: Replied) -> None:
        progress, sampled = self._progress, event.sampled
        progress.rows = (*progress.rows[:-1], progress.rows[-1].sampled(sampled))
        active_s = event.duration_s if sampled.active_s is None else sampled.active_s
        calls = self._read_calls(event.text)
        turn = Turn(
            text=clean(event.text),
            tool_calls=calls,
            num_prompt_tokens=len(progress.rows[-1].ids_T) - len(sampled.ids),
            num_sampled_tokens=len(sampled.ids),
            generate_s=active_s,
            finish=sampled.finish,
        )
        progress.turns = (*progress.turns, turn)
        progress.active_s += sampled.active_s or 0.0
        self._count_time("generate", active_s)
        self._count_time("queue", max(0.0, event.duration_s - active_s))
        if sampled.finish is FinishReason.ABORTED:
            self._cut(Outcome.INFRA_FAILED, "the engine aborted the request")
        elif calls:
            self._act(calls)
        else:
            self._stop(self._last_reason(sampled))

    def _read_calls(self, text: str) -> tuple[ToolCall, ...]:
        offered = self.task.description.tools
        if not offered:
            return ()
        given = self.task.prefix if not self._progress.turns else ""
        first = 1 + sum(len(turn.tool_calls) for turn in self._progress.turns)
        return tools.read(given + text, self._format, tools=offered, first=first)

    def _act(self, calls: tuple[ToolCall, ...]) -> None:
        """Refuse what cannot be carried out and have the rest carried out."""
        progress, limits = self._progress, self.task.limits
        identity = tools.identity(calls)
        progress.streak = progress.streak + 1 if identity == progress.last_calls else 1
        progress.last_calls = identity
        self._count("tool_calls", len(calls))
        refused = {call.id: tools.refuse(call, self.task.description.tools) for call in calls}
        answered = {id_: refusal for id_, refusal in refused.items() if refusal}
        for refusal in answered.values():
            self._count(refusal.kind.value)
        if limits.loop_limit and progress.streak >= limits.loop_limit:
            self._stop(StopReason.LOOP)
            return
        if self._time_left_s <= 0:
            self._stop(StopReason.TIME_LIMIT)
            return
        progress.answered = {id_: refusal.message for id_, refusal in answered.items()}
        progress.pending = tuple(call for call in calls if call.id not in answered)
        if progress.pending:
            progress.state = State.EXECUTING
        else:
            self._note_observations({}, 0.0)
            self._go_on()

    def _executed(self, event: Observed | TimedOut) -> None:
        self._note_observations(event.results, event.duration_s)
        self._progress.active_s += event.duration_s
        self._count_time("execute", event.duration_s)
        self._progress.pending = ()
        if isinstance(event, TimedOut):
            self._stop(StopReason.TIME_LIMIT)
        else:
            self._go_on()

    def _note_observations(self, results: Mapping[str, str], duration_s: float) -> None:
        progress, limit = self._progress, self.task.limits.max_observation_chars
        known = {**progress.answered, **results}
        turn = progress.turns[-1]
        texts = tuple(
            head_and_tail(clean(known.get(call.id, NOT_RUN)), limit) for call in turn.tool_calls
        )
        turn = replace(turn, observations=texts, execute_s=duration_s)
        progress.turns = (*progress.turns[:-1], turn)
        progress.answered = {}

    def _go_on(self) -> None:
        """Sample the next turn, or stop at the limit that forbids it."""
        progress, limits = self._progress, self.task.limits
        if self._time_left_s <= 0:
            self._stop(StopReason.TIME_LIMIT)
        elif len(progress.turns) >= limits.max_turns:
            self._stop(StopReason.TURN_LIMIT)
        elif self._tokens_left < 1:
            self._stop(StopReason.TOKEN_LIMIT)
        else:
            longer = self._rows_for_next_turn()
            if len(longer[-1].ids_T) >= limits.max_context_tokens:
                self._stop(StopReason.CONTEXT_LIMIT)
            else:
                progress.rows = longer
                self._ask()

    def _rows_for_next_turn(self) -> tuple[Row, ...]:
        earlier, turns = self._progress.rows, self._progress.turns
        if not self._renderer.appends:
            prompt = self._renderer.prompt(self.task, turns)
            return (*earlier, Row().given(prompt))
        last_id = earlier[-1].ids_T[-1] if turns[-1].num_sampled_tokens else None
        suffix = self._renderer.suffix(self.task, turns[-1], last_id=last_id)
        return (*earlier[:-1], earlier[-1].given(suffix))

    def _ask(self) -> None:
        self._progress.max_tokens = min(self._max_turn_tokens, self._tokens_left, self._room)
        self._progress.state = State.SAMPLING

    # --- limits -------------------------------------------------------------------------------

    @property
    def _room(self) -> int:
        return self.task.limits.max_context_tokens - len(self._progress.rows[-1].ids_T)

    @property
    def _tokens_left(self) -> int:
        return self.task.limits.max_tokens - _num_sampled(self._progress.turns)

    @property
    def _time_left_s(self) -> float:
        return self.task.limits.time_s - self._progress.active_s

    def _last_reason(self, sampled: Sampled) -> StopReason:
        """Why a turn without calls is the last one."""
        if sampled.finish is not FinishReason.LENGTH:
            return StopReason.FINISHED
        full = self._room < 1 <= self._tokens_left
        return StopReason.CONTEXT_LIMIT if full else StopReason.TOKEN_LIMIT

    def _stop(self, reason: StopReason) -> None:
        self._progress.state = State.STOPPED
        self._progress.stop = reason

    def _cut(self, outcome: Outcome, error: str) -> None:
        """End from outside; a reason to stop that was there already stays."""
        self._stop(self._progress.stop or StopReason.ABORTED)
        self._progress.pending = ()
        self._progress.outcome = outcome
        self._progress.error = clean(error)

    def _count(self, name: str, by: int = 1) -> None:
        counters = self._progress.counters
        self._progress.counters = {**counters, name: counters.get(name, 0) + by}

    def _count_time(self, name: str, by_s: float) -> None:
        timings = self._progress.timings_s
        self._progress.timings_s = {**timings, name: timings.get(name, 0.0) + by_s}

    # --- looking ------------------------------------------------------------------------------

    @property
    def outcome(self) -> Outcome | None:
        """`infra_failed` or `cancelled` where the attempt was cut from outside, else None."""
        return self._progress.outcome

    def trajectory(
        self, request: AttemptRequest, *, artefacts: Mapping[str, Json] | None = None
    ) -> Trajectory:
        """The record of the attempt so far; rows in which nothing was sampled are left out."""
        progress = self._progress
        return Trajectory(
            key=request.key,
            task=self.task,
            rows=tuple(row for row in progress.rows if row.num_trained),
            turns=progress.turns,
            stop=progress.stop or StopReason.ABORTED,
            outcome=progress.outcome,
            lane=request.lane,
            tries=request.tries,
            error=progress.error,
            counters=dict(progress.counters),
            timings_s=dict(progress.timings_s),
            artefacts=dict(artefacts or {}),
        )

    def save(self) -> Json:
        """A JSON value from which `load` goes on; the pending instruction is given again."""
        return codec.to_json(self._progress)

    @classmethod
    def load(cls, task: Task, renderer: Renderer, saved: Json, *, max_turn_tokens: int) -> Attempt:
        """The attempt that was saved.

        Raises:
            TypeError: `saved` does not come from `save`.
        """
        progress = codec.from_json(Progress, saved)
        return cls(task, renderer, max_turn_tokens=max_turn_tokens, progress=progress)

    def stats(self) -> AttemptStats:
        """Where it stands."""
        progress = self._progress
        return AttemptStats(
            state=progress.state,
            num_turns=len(progress.turns),
            num_sampled=_num_sampled(progress.turns),
            num_context=len(progress.rows[-1].ids_T) if progress.rows else 0,
            streak=progress.streak,
            active_s=progress.active_s,
        )

    def check(self) -> None:
        """Assert the invariants."""
        progress, limits = self._progress, self.task.limits
        trained = sum(row.num_trained for row in progress.rows)
        assert trained == _num_sampled(progress.turns), "a sampled token is not in exactly one row"
        for row in progress.rows:
            columns = zip(row.mask_T, row.logprobs_T, row.versions_T, strict=True)
            given = [(logprob, version) for mask, logprob, version in columns if not mask]
            assert set(given) <= {(0.0, -1)}, "a given token has a log-probability or a version"
        assert (progress.state is State.STOPPED) == (progress.stop is not None)
        assert (progress.state is State.EXECUTING) == bool(progress.pending)
        assert len(progress.turns) <= limits.max_turns
        assert _num_sampled(progress.turns) <= limits.max_tokens
        assert all(len(row.ids_T) <= limits.max_context_tokens for row in progress.rows) or (
            progress.outcome is Outcome.INFRA_FAILED
        )
        assert not (self._renderer.appends and len(progress.rows) > 1), "one row was promised"
        for turn in progress.turns:
            assert len(turn.observations) in (0, len(turn.tool_calls))


def _num_sampled(turns: Sequence[Turn]) -> int:
    return sum(turn.num_sampled_tokens for turn in turns)
