"""Reference solutions played through the same machine as any attempt.

An oracle's turns become exactly the token ids the policy would have to emit; tools really execute,
limits really hold, and the trajectory is verified like any other. That makes it training data for
SFT (mask 1 on the oracle's tokens, no version, log-probability 0). The one thing that must stay
true: nothing about an oracle attempt is rendered by code of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from posttrain.core.ports import Attempted, AttemptRequest, Executor, Policy, SampleRequest
from posttrain.core.task import Oracle, OracleTurn, Task, Tool
from posttrain.core.trajectory import FinishReason, Sampled
from posttrain.core.verdict import Outcome
from posttrain.rollout import tools
from posttrain.rollout.drive import story, unfinished
from posttrain.rollout.render import Renderer
from posttrain.rollout.tools import CallFormat

Solve = Callable[[Task], Awaitable[Oracle]]
"""The oracle of a task (`Domain.oracle`, run wherever a domain's code may run)."""
Executors = Callable[[Policy], Mapping[str, Executor]]
"""The executors over a policy."""


class OraclePolicy:
    """A `Policy` that replies with an oracle's turns, one after the other."""

    def __init__(self, task: Task, oracle: Oracle, renderer: Renderer) -> None:
        self._task = task
        self._turns = iter(oracle.turns)
        self._given = task.prefix
        self._renderer = renderer

    async def sample(self, request: SampleRequest) -> Sampled:
        """The next turn; a turn longer than `max_tokens` is cut, as a policy's would be. After the
        last one the reply is empty.
        """
        turn = next(self._turns, OracleTurn())
        offered = self._task.description.tools
        form = self._renderer.call_format(offered)
        text = oracle_text(turn, given=self._given, offered=offered, form=form)
        self._given = ""
        written = self._renderer.reply_ids(text)
        ids = written[: request.sampling.max_tokens]
        none = len(ids) * (-1,)
        finish = FinishReason.STOP if len(ids) == len(written) else FinishReason.LENGTH
        return Sampled(
            ids=ids, logprobs=len(ids) * (0.0,), versions=none, kv_versions=none, finish=finish
        )


class OracleExecutor:
    """An executor that plays oracles instead of sampling."""

    def __init__(self, solve: Solve, executors: Executors, renderer: Renderer) -> None:
        self._solve = solve
        self._executors = executors
        self._renderer = renderer

    async def run(self, request: AttemptRequest) -> Attempted:
        """Play the task's oracle; an oracle that cannot be had or played is `infra_failed`."""
        task = request.task
        try:
            policy = OraclePolicy(task, await self._solve(task), self._renderer)
            return await self._executors(policy)[task.executor].run(request)
        except Exception as error:
            told = f"oracle of {task.domain}: {story(error)}"
            return Attempted(trajectory=unfinished(request, Outcome.INFRA_FAILED, told))


def oracle_text(turn: OracleTurn, *, given: str, offered: Sequence[Tool], form: CallFormat) -> str:
    """What a policy would have to write for a turn behind a given prefix: its text, then its
    calls. Behind a prefix that ends in no white space a text starts with a space and a call on a
    line of its own, unless they bring their own.

    >>> oracle_text(OracleTurn(text="42"), given="Answer:", offered=(), form=CallFormat.LINE)
    ' 42'
    """
    text = turn.text
    if text and given and not (given[-1].isspace() or text[0].isspace()):
        text = f" {text}"
    if not turn.tool_calls:
        return text
    calls = tools.write(turn.tool_calls, form, tools=offered)
    return calls if (given + text)[-1:] in ("", "\n") and not text else f"{text}\n{calls}"
