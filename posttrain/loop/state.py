"""The closed loop as a plain object: events in, instructions out (`loop.moves` names both).

    NEW ─▶ (EVALUATING base) ─▶ COLLECTING ─▶ TRAINING ─▶ PUBLISHING ─▶ COLLECTING …
                                    │             └───────────┴─▶ SAVING ─▶ (EVALUATING) ─▶ …
                                    └─ end of a phase ─▶ SAVING ─▶ (EVALUATING sft | rl) ─▶ …
    any ─▶ SAVING ─▶ STOPPED        interrupted, failed

It knows no clock, no file and no model; the driver carries out what it asks. Synchronous: groups
are drawn while a batch is collected. One-step-asynchronous (staleness bound ≥ 1): the next batch
is generated while one trains, so twice a batch may be under way. The one thing that must stay
true: a group is trained or dropped exactly once, and a batch is refilled for what was dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from posttrain.core.errors import IllegalTransitionError
from posttrain.core.verdict import Outcome
from posttrain.loop.health import Health
from posttrain.loop.moves import (
    DOMAIN_ERROR,
    Begin,
    BudgetSpent,
    Draw,
    DropGroup,
    Evaluate,
    Evaluated,
    Event,
    Failed,
    GroupEnded,
    Instruction,
    Interrupted,
    LoopPlan,
    Pending,
    Phase,
    PhasePlan,
    Position,
    Publish,
    Published,
    Quarantine,
    Reopen,
    Save,
    Saved,
    SourceDry,
    StepDone,
    Stop,
    TaskFailed,
    Train,
    Warn,
)
from posttrain.loop.shelf import HELD, Shelf
from posttrain.schedule.staleness import Lineage


class Stage(StrEnum):
    """What the main line of the loop is doing."""

    NEW = "new"
    EVALUATING = "evaluating"
    COLLECTING = "collecting"
    TRAINING = "training"
    PUBLISHING = "publishing"
    SAVING = "saving"
    STOPPED = "stopped"


TRANSITIONS: Mapping[Stage, frozenset[Stage]] = {
    Stage.NEW: frozenset({Stage.EVALUATING, Stage.COLLECTING, Stage.STOPPED}),
    Stage.EVALUATING: frozenset({Stage.EVALUATING, Stage.COLLECTING, Stage.SAVING, Stage.STOPPED}),
    Stage.COLLECTING: frozenset(
        {Stage.TRAINING, Stage.EVALUATING, Stage.COLLECTING, Stage.SAVING, Stage.STOPPED}
    ),
    Stage.TRAINING: frozenset({Stage.PUBLISHING, Stage.COLLECTING, Stage.SAVING, Stage.STOPPED}),
    Stage.PUBLISHING: frozenset({Stage.COLLECTING, Stage.SAVING, Stage.STOPPED}),
    Stage.SAVING: frozenset({Stage.COLLECTING, Stage.EVALUATING, Stage.STOPPED}),
    Stage.STOPPED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStats:
    """Where a loop stands."""

    stage: Stage
    phase: Phase | None
    """None: every phase is over."""
    step: int
    version: int
    next_draw: int
    open: int
    """Groups being made."""
    ready: int
    """Groups that wait for a step."""
    waiting: int
    """Draws of before a resume that were not reopened yet."""
    quarantined: tuple[str, ...]


class Loop:
    """The state machine. `lineage` is shared with whoever judges staleness elsewhere."""

    def __init__(self, plan: LoopPlan, *, position: Position, lineage: Lineage) -> None:
        self._plan = plan
        self._lineage = lineage
        self._stage = Stage.NEW
        self._step = position.step
        self._saved_step = position.step
        self._next_draw = position.next_draw
        self._shelf = Shelf(lineage, waiting=position.pending, held=position.held)
        self._evaluated = set(position.evaluated)
        self._quarantined = set(position.quarantined)
        self._health = dict(position.health)
        self._over: set[Phase] = set()
        self._active: PhasePlan | None = None
        self._dry: SourceDry | None = None
        self._stopping = ""

    # --- what is told -------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Take in one event; what is to be done now, in order.

        Raises:
            IllegalTransitionError: the event does not fit the stage.
        """
        if self._stage is Stage.STOPPED:
            return []
        match event:
            case Begin():
                self._expect(event, Stage.NEW)
                return self._proceed()
            case GroupEnded():
                return [*self._take_in(event), *self._advance()]
            case TaskFailed():
                return [*self._task_failed(event), *self._advance()]
            case SourceDry():
                self._shelf.open.discard(event.draw)
                self._dry = event
                return self._advance()
            case StepDone():
                return self._step_done(event)
            case Published():
                self._expect(event, Stage.PUBLISHING)
                return self._after_step()
            case Saved():
                self._expect(event, Stage.SAVING)
                self._saved_step = self._step
                return self._proceed()
            case Evaluated():
                self._expect(event, Stage.EVALUATING)
                self._evaluated.add(event.point)
                return self._proceed()
            case BudgetSpent():
                self._over.add(Phase.RL)
                return self._advance()
            case Interrupted():
                return self._interrupted()
            case Failed():
                return self._failed(event)
            case _:
                raise IllegalTransitionError(f"the loop knows no event {event!r}.")

    def check(self) -> None:
        """Invariants."""
        self._shelf.check()
        assert all(draw < self._next_draw for draw in self._shelf.draws())
        assert bool(self._shelf.training) == (self._stage is Stage.TRAINING)
        if self._active is not None:
            room = self._active.groups * (2 if self._active.max_staleness else 1)
            assert self._shelf.under_way <= room, "a bounded amount is under way"
        self._lineage.check()
        for health in self._health.values():
            health.check()

    def stats(self) -> LoopStats:
        """Where the loop stands."""
        return LoopStats(
            stage=self._stage,
            phase=None if self._active is None else self._active.phase,
            step=self._step,
            version=self._lineage.current,
            next_draw=self._next_draw,
            open=len(self._shelf.open),
            ready=len(self._shelf.ready),
            waiting=len(self._shelf.waiting),
            quarantined=tuple(sorted(self._quarantined)),
        )

    # --- the main line ------------------------------------------------------------------------

    def _proceed(self) -> list[Instruction]:
        """Go on between steps: an evaluation that is due, the next batch, or the end."""
        if self._stopping:
            return self._stop(self._stopping)
        over = [plan for plan in self._plan.phases if self._is_over(plan)]
        late = self._shelf.pop_waiting({plan.phase for plan in over})
        dropped: list[Instruction] = [DropGroup(draw=w.draw, reason="phase_over") for w in late]
        point = self._due_point(over)
        if point is not None:
            self._enter(Stage.EVALUATING)
            return [*dropped, Evaluate(point=point)]
        active = next((plan for plan in self._plan.phases if plan not in over), None)
        if active is not self._active:
            self._active, self._dry = active, None
        if active is None:
            return [*dropped, *self._stop("done")]
        self._enter(Stage.COLLECTING)
        return [*dropped, *self._advance()]

    def _due_point(self, over: Sequence[PhasePlan]) -> str | None:
        """A point not yet evaluated at which the weights stand right now."""
        points = ["base"] if self._step == 0 else []
        points += [str(p.phase) for p in over if p.steps and self._step <= self._last_step(p)]
        due: list[str | None] = [point for point in points if point in self._plan.points]
        due += [self._plan.midway(self._step)] if len(over) < len(self._plan.phases) else []
        return next((point for point in due if point and point not in self._evaluated), None)

    def _advance(self) -> list[Instruction]:
        """Ask for groups as far as there is room, and train once a batch is full."""
        plan = self._active
        if plan is None:
            return []
        over = self._is_over(plan)
        if self._stage is Stage.COLLECTING:
            return self._end_phase() if over else self._collect(plan)
        if self._stage in (Stage.TRAINING, Stage.PUBLISHING, Stage.SAVING):
            ahead = plan.max_staleness and not over and not self._stopping
            return self._draw(plan) if ahead else []
        return []

    def _collect(self, plan: PhasePlan) -> list[Instruction]:
        out = self._shelf.sift(plan)
        exhausted = self._dry is not None and self._shelf.is_exhausted(plan.phase)
        ready = len(self._shelf.ready)
        if ready >= plan.groups or (ready and exhausted):
            return [*out, *self._train(plan)]
        return [*out, *(self._run_out(plan) if exhausted else self._draw(plan))]

    def _draw(self, plan: PhasePlan) -> list[Instruction]:
        """Open groups up to what may be under way and what the phase still needs."""
        ahead = 1 if plan.max_staleness and not self._stopping else 0
        wanted = min(1 + ahead, self._last_step(plan) - self._step) * plan.groups
        out: list[Instruction] = []
        while self._shelf.under_way < wanted:
            if waiting := self._shelf.pop_waiting({plan.phase}, at_most=1):
                out.append(self._reopen(waiting[0]))
            elif self._dry is None:
                out.append(Draw(draw=self._next_draw, phase=plan.phase, size=plan.size))
                self._shelf.open.add(self._next_draw)
                self._next_draw += 1
            else:
                break
        return out

    def _reopen(self, waiting: Pending) -> Instruction:
        held = waiting.domain in self._shelf.held
        if held or waiting.domain in self._quarantined:
            return DropGroup(draw=waiting.draw, reason=HELD if held else "quarantined")
        self._shelf.open.add(waiting.draw)
        return Reopen(draw=waiting.draw)

    def _train(self, plan: PhasePlan) -> list[Instruction]:
        self._enter(Stage.TRAINING)
        train = Train(
            step=self._step + 1,
            phase=plan.phase,
            version=self._lineage.next_version,
            batches=self._shelf.pop_batch(plan.groups),
        )
        return [train, *self._advance()]

    def _step_done(self, event: StepDone) -> list[Instruction]:
        self._expect(event, Stage.TRAINING)
        assert self._active is not None, "a step belongs to a phase"
        self._shelf.training = ()
        self._step += 1
        self._evaluated.discard(self._active.phase)  # it was of weights before the phase's end
        if not event.changed:
            return self._after_step()
        version, parent = self._lineage.next_version, self._lineage.current
        self._lineage.publish(version, parent=parent)
        self._enter(Stage.PUBLISHING)
        return [Publish(version=version, parent=parent, step=self._step), *self._advance()]

    def _after_step(self) -> list[Instruction]:
        assert self._active is not None, "a step belongs to a phase"
        if self._is_over(self._active):
            return self._end_phase()
        halt = self._stopping or self._plan.midway(self._step)  # what is evaluated is saved
        if halt or self._step - self._saved_step >= self._plan.save_every:
            return self._save()
        self._enter(Stage.COLLECTING)
        return self._advance()

    def _end_phase(self) -> list[Instruction]:
        left = [DropGroup(draw=draw, reason="phase_over") for draw in self._shelf.clear()]
        return [*([] if self._stopping else left), *self._save()]  # or pending, for the resume

    def _save(self) -> list[Instruction]:
        """A checkpoint, unless this step has one; then on."""
        if self._step == self._saved_step:
            return self._proceed()
        self._enter(Stage.SAVING)
        save = Save(step=self._step, version=self._lineage.current, next_draw=self._next_draw)
        return [save, *self._advance()]

    def _run_out(self, plan: PhasePlan) -> list[Instruction]:
        """Nothing is left to draw, to wait for or to train."""
        assert self._dry is not None
        if not self._dry.healthy:
            return self._failed(Failed(message=self._dry.reason, savable=True))
        message = (
            f"The source of tasks ran dry in phase {plan.phase} after step {self._step} of "
            f"{self._last_step(plan)}: {self._dry.reason}"
        )
        self._over.add(plan.phase)
        return [Warn(message=message), *self._end_phase()]

    # --- groups -------------------------------------------------------------------------------

    def _take_in(self, event: GroupEnded) -> list[Instruction]:
        if event.draw not in self._shelf.open:
            return []  # dropped meanwhile: a late report
        sick = self._judge_health(
            event.domain,
            [member.outcome for member in event.members],
            errors=[member.error for member in event.members],
        )
        held = self._shelf.take_in(event)
        return [*sick, *held, *(self._shelf.sift(self._active) if self._active else [])]

    def _task_failed(self, event: TaskFailed) -> list[Instruction]:
        if event.draw not in self._shelf.open:
            return []
        self._shelf.open.discard(event.draw)
        dropped = DropGroup(draw=event.draw, reason=f"{DOMAIN_ERROR}: {event.error}")
        failures = [Outcome.INFRA_FAILED] * event.size
        return [dropped, *self._judge_health(event.domain, failures, errors=[event.error])]

    def _judge_health(
        self, domain: str, outcomes: Sequence[Outcome], *, errors: Sequence[str]
    ) -> list[Instruction]:
        health = self._health.setdefault(domain, Health())
        if not health.record(outcomes, errors=errors) or domain in self._quarantined:
            return []
        self._quarantined.add(domain)
        return [Quarantine(domain=domain, evidence=health.evidence)]

    # --- the ends -----------------------------------------------------------------------------

    def _interrupted(self) -> list[Instruction]:
        if self._stopping:
            return []
        self._stopping = "interrupted"
        if self._stage is Stage.EVALUATING:
            return self._save()
        return self._stop(self._stopping) if self._stage is Stage.NEW else []

    def _failed(self, event: Failed) -> list[Instruction]:
        again = self._stopping.startswith("failed")
        before = f"{self._stopping} Then" if again else "failed"
        self._stopping = f"{before}: {event.message}"
        self._shelf.training = ()
        if event.savable and not again and self._stage is not Stage.SAVING:
            return self._save()
        return self._stop(self._stopping)

    def _stop(self, reason: str) -> list[Instruction]:
        self._enter(Stage.STOPPED)
        return [Stop(reason=reason)]

    # --- small questions ----------------------------------------------------------------------

    def _last_step(self, plan: PhasePlan) -> int:
        """The running number of the phase's last step."""
        at = self._plan.phases.index(plan)
        return sum(earlier.steps for earlier in self._plan.phases[: at + 1])

    def _is_over(self, plan: PhasePlan) -> bool:
        return plan.phase in self._over or self._step >= self._last_step(plan)

    def _expect(self, event: Event, stage: Stage) -> None:
        if self._stage is not stage:
            raise IllegalTransitionError(
                f"{type(event).__name__} came while the loop was {self._stage} (step {self._step}, "
                f"{self._shelf.under_way} groups under way); it belongs to {stage}.",
                "report this as a bug, with the run's ledger.",
            )

    def _enter(self, stage: Stage) -> None:
        if stage not in TRANSITIONS[self._stage]:
            raise IllegalTransitionError(
                f"the loop cannot go from {self._stage} to {stage} (step {self._step}).",
                "report this as a bug, with the run's ledger.",
            )
        self._stage = stage
