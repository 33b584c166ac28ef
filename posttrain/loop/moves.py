"""What the loop's state machine is given (a plan), told (events) and asks for (instructions).

Plain frozen records, no behaviour. The one thing that must stay true: an instruction names
everything its carrying out needs, so that the driver decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from posttrain.core.verdict import Outcome
from posttrain.loop.health import Health

DOMAIN_ERROR = "domain_error"
"""How the reason begins for which attempts are dropped that have no task: their domain raised."""


class Phase(StrEnum):
    """What a draw is made for; phases follow one another in this order."""

    SFT = "sft"
    """Imitate oracle trajectories."""
    RL = "rl"
    """Learn from verified outcomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """How one attempt of a group ended."""

    key: str
    outcome: Outcome
    versions: tuple[int, ...] = ()
    """Distinct versions of its trained tokens."""
    has_reward: bool = True
    """Whether it can be trained on: its outcome gave a reward."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The members of one group that a step trains on."""

    draw: int
    keys: tuple[str, ...]


# --- what a run is to do, and where it stands -------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """One phase."""

    phase: Phase
    steps: int
    """Optimiser steps at most."""
    groups: int
    """Groups in one step."""
    size: int
    """Attempts in one group."""
    max_staleness: int = 0
    """0: synchronous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """What a run is to do."""

    phases: tuple[PhasePlan, ...]
    points: frozenset[str] = frozenset()
    """Of `base`, `sft`, `rl`: where the suite is run."""
    evaluate_every: int | None = None
    """RL steps between runs of the suite within that phase; None: at `points` alone."""
    save_every: int = 20
    """Steps between checkpoints."""

    def midway(self, step: int) -> str | None:
        """The name of the evaluation that is due after this step of the run, within RL.

        >>> sft, rl = (PhasePlan(phase=p, steps=4, groups=1, size=1) for p in (Phase.SFT, Phase.RL))
        >>> plan = LoopPlan(phases=(sft, rl), evaluate_every=2)
        >>> [plan.midway(step) for step in range(9)]
        [None, None, None, None, None, None, 'rl@6', None, None]
        """
        begun = 0
        for plan in self.phases:
            done = step - begun
            if plan.phase is Phase.RL and self.evaluate_every and 0 < done < plan.steps:
                return f"rl@{step}" if done % self.evaluate_every == 0 else None
            begun += plan.steps
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A draw of before the resume that is neither trained nor dropped as a whole."""

    draw: int
    phase: Phase
    domain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run stands when it begins or goes on."""

    step: int = 0
    next_draw: int = 0
    pending: tuple[Pending, ...] = ()
    evaluated: frozenset[str] = frozenset()
    quarantined: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    """Domains whose groups are held out of training until people release them."""
    health: Mapping[str, Health] = field(default_factory=dict)
    """How each domain's last attempts ended, those of pending draws not counted."""


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """Base of what the state machine is told."""


@dataclass(frozen=True, slots=True)
class Begin(Event):
    """The run starts, or goes on from where it was resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded(Event):
    """Every attempt of a draw came to its end."""

    draw: int
    domain: str
    members: tuple[Member, ...]
    alarm: str = ""
    """Evidence for which the domain is held from this group on; '': none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailed(Event):
    """The domain gave no task for a draw; its attempts will never be made."""

    draw: int
    domain: str
    size: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDry(Event):
    """A draw was asked for and there is nothing left to decide on; the draw was not made."""

    draw: int
    reason: str
    healthy: bool = True
    """False: only because every domain is quarantined; the run then fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone(Event):
    """The step in progress was made; `changed` tells whether any weight changed."""

    changed: bool


@dataclass(frozen=True, slots=True)
class Published(Event):
    """The version asked for is in use."""


@dataclass(frozen=True, slots=True)
class Saved(Event):
    """The checkpoint asked for is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Event):
    """The suite was run at a named point."""

    point: str


@dataclass(frozen=True, slots=True)
class BudgetSpent(Event):
    """The RL phase has used up its time."""


@dataclass(frozen=True, slots=True)
class Interrupted(Event):
    """A person wants the run to stop after the step in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """Something the run cannot go on with happened."""

    message: str
    savable: bool
    """Whether the trainer's weights are whole, so that a last checkpoint is worth trying."""


# --- instructions -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Instruction:
    """Base of what the state machine asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw(Instruction):
    """Decide on a task under a new number and make its attempts."""

    draw: int
    phase: Phase
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reopen(Instruction):
    """Go on with a draw of before the resume: reuse what is good, make the rest again."""

    draw: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropMembers(Instruction):
    """These attempts of a draw will never be trained."""

    draw: int
    keys: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropGroup(Instruction):
    """No attempt of this draw will be trained; end those still being made."""

    draw: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(Instruction):
    """Make an optimiser step; weights that change by it become `version`."""

    step: int
    phase: Phase
    version: int
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish(Instruction):
    """Hand the new weights to the engine."""

    version: int
    parent: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(Instruction):
    """Write a checkpoint."""

    step: int
    version: int
    next_draw: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate(Instruction):
    """Run the suite."""

    point: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine(Instruction):
    """Decide on no task of this domain any more."""

    domain: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(Instruction):
    """Decide on no task of this domain, and train on none, until people release it."""

    domain: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn(Instruction):
    """Tell people."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Instruction):
    """End the run: `done`, `interrupted` or `failed: …`."""

    reason: str
