"""Attempts at a task, each to its verdict: execute → seal → verify → outcome.

The loop, evaluations, admission and `try` all call this. It chooses no tasks and asks nobody for
room; its own two limits are attempts per member and verifications at once. The one thing that must
stay true: every request ends in one trajectory with one outcome, an error is never a reward, and a
sealed workspace is always closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from posttrain.core.containment import Sealed
from posttrain.core.errors import nearest
from posttrain.core.ports import Attempted, AttemptRequest, Clock, Executor, Verifier
from posttrain.core.task import Json, Lane, Task
from posttrain.core.trajectory import AttemptKey, Group, Trajectory
from posttrain.core.verdict import Outcome
from posttrain.rollout.drive import story, unfinished
from posttrain.rollout.text import clean, clean_value

OnFinished = Callable[[Trajectory], None]
Keep = Callable[[AttemptKey, Task, Sealed], Awaitable[Mapping[str, Json]]]
"""Keeps what an attempt left for later verification; says where, or why not. Raises nothing."""
WORKSPACE = ".workspace"
"""Artefact under which a trajectory says where its workspace is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often an attempt that infrastructure failed is made again; the only retry layer."""

    attempts: int = 3
    """Attempts in all, the first one included."""
    pause_s: float = 0.5
    """Pause before the second attempt; it doubles with each further one."""
    max_pause_s: float = 8.0

    def pause_after(self, failures: int) -> float:
        """Seconds to wait after so many failures.

        >>> [Retries().pause_after(failures) for failures in (1, 2, 3, 9)]
        [0.5, 1.0, 2.0, 8.0]
        """
        return min(self.max_pause_s, self.pause_s * 2.0 ** (failures - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsStats:
    """Counts since `Groups` was made."""

    running: int
    verifying: int
    retries: int
    outcomes: Mapping[Outcome, int]


class Groups:
    """Makes attempts and groups of them.

    `executors`: name → executor, as tasks name them. `max_verifications`: verdicts worked out at
    once, over all groups. `keep` is given what the attempts of training leave.
    """

    def __init__(
        self,
        executors: Mapping[str, Executor],
        verifier: Verifier,
        clock: Clock,
        *,
        retries: Retries | None = None,
        max_verifications: int = 8,
        keep: Keep | None = None,
    ) -> None:
        self._executors = executors
        self._verifier = verifier
        self._clock = clock
        self._retries = retries or Retries()
        self._verifications = asyncio.Semaphore(max_verifications)
        self._keep = keep
        self._running = self._verifying = self._num_retries = 0
        self._outcomes: Counter[Outcome] = Counter()

    async def attempt(self, request: AttemptRequest) -> Trajectory:
        """Make one attempt, to its verdict. Raises nothing but cancellation."""
        self._running += 1
        try:
            trajectory = await self._try(request)
            while trajectory.outcome is Outcome.INFRA_FAILED and self._may_retry(request):
                self._num_retries += 1
                await self._clock.sleep(self._retries.pause_after(request.tries))
                request = replace(request, tries=request.tries + 1)
                trajectory = await self._try(request)
        finally:
            self._running -= 1
        assert trajectory.outcome is not None, "an attempt without an outcome"
        self._outcomes[trajectory.outcome] += 1
        return trajectory

    async def run(
        self, requests: Sequence[AttemptRequest], on_finished: OnFinished | None = None
    ) -> Group:
        """Make all attempts of one task side by side.

        `on_finished` is told of each member as soon as it has its outcome, of members that a
        cancellation ends too; what it raises ends the whole group and is raised here.
        """
        draws = {request.key.draw for request in requests}
        assert len(draws) == 1, f"one group is one draw; got {sorted(draws)}"
        told: set[AttemptKey] = set()

        def tell(trajectory: Trajectory) -> None:
            told.add(trajectory.key)
            if on_finished is not None:
                on_finished(trajectory)

        members = [asyncio.create_task(self._member(request, tell)) for request in requests]
        try:
            done = await asyncio.gather(*members)
        except BaseException:
            for member in members:
                member.cancel()
            await asyncio.gather(*members, return_exceptions=True)
            for request in requests:
                if request.key not in told:
                    tell(self._cancelled(request))
            raise
        return Group(draw=draws.pop(), task=requests[0].task, members=tuple(done))

    def stats(self) -> GroupsStats:
        """Counts."""
        return GroupsStats(
            running=self._running,
            verifying=self._verifying,
            retries=self._num_retries,
            outcomes=dict(self._outcomes),
        )

    def check(self) -> None:
        """Assert the invariants."""
        assert 0 <= self._verifying <= self._running, "a verdict is worked out for nobody"

    async def _member(self, request: AttemptRequest, tell: OnFinished) -> Trajectory:
        trajectory = await self.attempt(request)
        tell(trajectory)
        return trajectory

    def _cancelled(self, request: AttemptRequest) -> Trajectory:
        self._outcomes[Outcome.CANCELLED] += 1
        return unfinished(request, Outcome.CANCELLED, "cancelled")

    def _may_retry(self, request: AttemptRequest) -> bool:
        known = request.task.executor in self._executors
        return known and request.tries < self._retries.attempts

    async def _try(self, request: AttemptRequest) -> Trajectory:
        attempted = await self._execute(request)
        try:
            made = replace(attempted.trajectory, tries=request.tries)
            if attempted.sealed is not None and self._keep and request.lane is Lane.TRAIN:
                kept = await self._keep(request.key, request.task, attempted.sealed)
                made = replace(made, artefacts={**made.artefacts, WORKSPACE: kept})
            return _storable(await self._judge(made, attempted.sealed))
        finally:
            if attempted.sealed is not None:
                await asyncio.shield(attempted.sealed.close())

    async def _execute(self, request: AttemptRequest) -> Attempted:
        name = request.task.executor
        executor = self._executors.get(name)
        if executor is None:
            known = ", ".join(sorted(self._executors))
            error = f"no executor {name!r}{nearest(name, self._executors)}. Executors: {known}"
            return Attempted(trajectory=unfinished(request, Outcome.INFRA_FAILED, error))
        try:
            return await executor.run(request)
        except Exception as error:
            failed = unfinished(request, Outcome.INFRA_FAILED, f"{name}: {story(error)}")
            return Attempted(trajectory=failed)

    async def _judge(self, trajectory: Trajectory, sealed: Sealed | None) -> Trajectory:
        if trajectory.outcome is not None:
            return trajectory
        if sealed is None and not trajectory.final_text.strip():
            return replace(trajectory, outcome=Outcome.POLICY_FAILED, error="the reply is empty")
        async with self._verifications:
            self._verifying += 1
            started_s = self._clock.now_s()
            try:
                verdict = await self._verifier.verify(trajectory, sealed)
            except Exception as error:
                return _failed_to_judge(trajectory, f"the verifier raised {story(error)}")
            finally:
                self._verifying -= 1
            spent = {"verify": self._clock.now_s() - started_s}
        trajectory = replace(trajectory, timings_s={**trajectory.timings_s, **spent})
        trajectory = trajectory.judged(verdict, Outcome.SCORED)
        if verdict.reward is None:
            return _failed_to_judge(trajectory, "; ".join(verdict.errors) or "nothing was judged")
        return trajectory


def _failed_to_judge(trajectory: Trajectory, error: str) -> Trajectory:
    return replace(trajectory, outcome=Outcome.VERIFIER_FAILED, error=error)


def _storable(trajectory: Trajectory) -> Trajectory:
    """The trajectory with every text of it fit for UTF-8."""
    turns = tuple(
        replace(
            turn,
            text=clean(turn.text),
            tool_calls=tuple(
                replace(call, name=clean(call.name), raw=clean(call.raw),
                        arguments=clean_value(call.arguments))
                for call in turn.tool_calls
            ),
            observations=tuple(clean(text) for text in turn.observations),
        )
        for turn in trajectory.turns
    )  # fmt: skip
    verdict = trajectory.verdict and replace(
        trajectory.verdict,
        components=tuple(
            replace(part, evidence=clean_value(part.evidence), error=clean_value(part.error))
            for part in trajectory.verdict.components
        ),
    )
    return replace(
        trajectory,
        turns=turns,
        verdict=verdict,
        error=clean_value(trajectory.error),
        artefacts=clean_value(trajectory.artefacts),
    )
