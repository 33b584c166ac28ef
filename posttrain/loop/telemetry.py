"""What the steps of a run are told as: rewards by domain, tokens, and where the time went.

It measures by the clock it is given and by the compute thread's own busy times. The one thing that
must stay true: the seconds of a step's note sum to the wall time since the note before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from posttrain.core.ports import Clock, StepReport, Work
from posttrain.core.task import Json
from posttrain.core.trajectory import Group, Trajectory
from posttrain.loop.moves import Phase, Train
from posttrain.observe.cost import split_time


class Telemetry:
    """Sums since the last step."""

    def __init__(
        self, clock: Clock, busy_s: Callable[[], Mapping[Work, float]], *, rl_active_s: float = 0.0
    ) -> None:
        self._clock = clock
        self._busy_s = busy_s
        self._started_s = clock.now_s()
        self.rl_active_s = rl_active_s
        """Time the RL phase took so far, over resumes too; evaluations and saves not counted."""
        self.attempts = 0
        """Attempts that ended since the last step."""
        self._tokens = 0
        self._counters: dict[str, int] = {}
        self._execute_s = self._verify_s = 0.0
        self._mark_s = clock.now_s()
        self._mark_busy = dict(busy_s())

    def attempt(self, trajectory: Trajectory) -> None:
        """An attempt came to its end."""
        self.attempts += 1
        self._tokens += trajectory.num_sampled_tokens
        for name, count in trajectory.counters.items():
            self._counters[name] = self._counters.get(name, 0) + count
        self._execute_s += trajectory.timings_s.get("execute", 0.0)
        self._verify_s += trajectory.timings_s.get("verify", 0.0)

    def mark(self) -> None:
        """What comes from now on counts towards the next step (an evaluation or a save ended)."""
        self._mark_s = self._clock.now_s()
        self._mark_busy = dict(self._busy_s())

    def step(
        self, instruction: Train, groups: Sequence[Group], report: StepReport
    ) -> dict[str, Json]:
        """The note of a step that was made; the next one begins."""
        wall_s = self._clock.now_s() - self._mark_s
        if instruction.phase is Phase.RL:
            self.rl_active_s += wall_s
        busy = {kind: s - self._mark_busy.get(kind, 0.0) for kind, s in self._busy_s().items()}
        split = split_time(
            wall_s,
            generate_s=busy.get(Work.ENGINE, 0.0),
            train_s=busy.get(Work.TRAIN, 0.0) + busy.get(Work.UPDATE, 0.0),
            execute_s=self._execute_s,
            verify_s=self._verify_s,
        )
        metrics = {**report.metrics, **self._counters}
        if report.loss is not None:
            metrics["loss"] = report.loss
        if report.grad_norm is not None:
            metrics["grad_norm"] = report.grad_norm
        note: dict[str, Json] = {
            "phase": str(instruction.phase),
            "step": instruction.step,
            "version": instruction.version,
            "metrics": metrics,
            "domains": rewards_by_domain(groups),
            "seconds": {use: share * wall_s for use, share in split.share().items()},
            "tokens": self._tokens,
            "trained_tokens": report.num_tokens,
            "attempts": self.attempts,
            "skipped": report.skipped,
            "wall_s": self._clock.now_s() - self._started_s,
        }
        self.attempts = self._tokens = 0
        self._counters = dict.fromkeys(self._counters, 0)  # once counted, 0 is told too
        self._execute_s = self._verify_s = 0.0
        self.mark()
        return note


def rewards_by_domain(groups: Sequence[Group]) -> dict[str, Json]:
    """Mean reward and number of rewarded attempts of each domain."""
    rewards: dict[str, list[float]] = {}
    for group in groups:
        found = [reward for reward in group.rewards if reward is not None]
        rewards.setdefault(group.task.domain, []).extend(found)
    return {
        name: {"reward": sum(found) / len(found) if found else None, "n": len(found)}
        for name, found in sorted(rewards.items())
    }
