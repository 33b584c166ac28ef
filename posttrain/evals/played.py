"""Reference solutions, attacks and mutants carried out as attempts are, to their verdicts.

The one thing that must stay true: what is played here meets the executor, the sandbox and the
checks that a policy's attempt would.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from posttrain.core.ports import AttemptRequest, Clock, Verifier
from posttrain.core.task import Oracle, Task
from posttrain.core.trajectory import AttemptKey, Sampling, Trajectory
from posttrain.rollout.group import Groups
from posttrain.rollout.oracle import Executors, OracleExecutor
from posttrain.rollout.render import Renderer

Play = Callable[[Task, Oracle], Awaitable[Trajectory]]
"""Carries out an oracle's turns as an attempt, to its verdict."""


def player(executors: Executors, renderer: Renderer, verifier: Verifier, clock: Clock) -> Play:
    """Plays turns through the executor that the task names, sealed and judged like any attempt."""

    async def play(task: Task, oracle: Oracle) -> Trajectory:
        async def solve(_: Task) -> Oracle:
            return oracle

        executor = OracleExecutor(solve, executors, renderer)
        groups = Groups({task.executor: executor}, verifier, clock)
        request = AttemptRequest(
            key=AttemptKey(run="admission", draw=task.seed, member=0),
            task=task,
            sampling=Sampling(max_tokens=task.limits.max_turn_tokens),
        )
        return await groups.attempt(request)

    return play
