"""The executor `answer`: one reply, no tools, nothing left behind but text.

The one thing that must stay true: `run` raises nothing but cancellation.
"""

from __future__ import annotations

from posttrain.core.ports import Attempted, AttemptRequest, Clock, Policy
from posttrain.rollout.drive import Driver, story
from posttrain.rollout.moves import Event, Execute, Failed
from posttrain.rollout.render import Renderer


class AnswerExecutor:
    """Carries out tasks whose executor is `answer`."""

    def __init__(self, policy: Policy, renderer: Renderer, clock: Clock) -> None:
        self._driver = Driver(policy, renderer, clock)

    async def run(self, request: AttemptRequest) -> Attempted:
        """Make the attempt; infrastructure failures end as `infra_failed`."""
        attempt = self._driver.open(request)
        try:
            if request.task.description.tools:
                names = ", ".join(tool.name for tool in request.task.description.tools)
                attempt.handle(
                    Failed(error=f"executor 'answer' has no tools, and the task lists {names}")
                )
            else:
                await self._driver.play(attempt, request, _refuse)
        except Exception as error:
            attempt.handle(Failed(error=story(error)))
        return Attempted(trajectory=attempt.trajectory(request))


async def _refuse(instruction: Execute) -> Event:
    return Failed(error=f"an answer task cannot execute {len(instruction.calls)} calls")
