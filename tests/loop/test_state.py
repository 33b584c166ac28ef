from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import IllegalTransitionError
from posttrain.core.verdict import Outcome
from posttrain.loop.health import Health
from posttrain.loop.moves import (
    Begin,
    BudgetSpent,
    Draw,
    DropGroup,
    DropMembers,
    Evaluate,
    Evaluated,
    Event,
    Failed,
    GroupEnded,
    Instruction,
    Interrupted,
    LoopPlan,
    Member,
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
)  # fmt: skip
from posttrain.loop.state import Loop, Stage
from posttrain.schedule.staleness import Lineage


def rl(*, steps: int = 3, groups: int = 2, size: int = 2, staleness: int = 0) -> PhasePlan:
    return PhasePlan(phase=Phase.RL, steps=steps, groups=groups, size=size, max_staleness=staleness)


def sft(*, steps: int = 2, groups: int = 2) -> PhasePlan:
    return PhasePlan(phase=Phase.SFT, steps=steps, groups=groups, size=1)


@dataclass
class Harness:
    """Feeds a loop and keeps what it asked for."""

    plan: LoopPlan
    position: Position = field(default_factory=Position)
    said: list[Instruction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lineage = Lineage()
        for version in range(1, self.position.step + 1):
            self.lineage.publish(version, parent=version - 1)
        self.loop = Loop(self.plan, position=self.position, lineage=self.lineage)

    def tell(self, event: Event) -> list[Instruction]:
        out = self.loop.handle(event)
        self.said += out
        self.loop.check()
        return out

    def end(self, draw: int, *, size: int = 2, **fields: Any) -> list[Instruction]:
        version = self.lineage.current
        return self.tell(group(draw, size=size, versions=(version,), **fields))


def group(draw: int, *, size: int = 2, domain: str = "d", **fields: Any) -> GroupEnded:
    members = tuple(
        Member(key=f"{draw}.{i}", **{"outcome": Outcome.SCORED, **fields}) for i in range(size)
    )
    return GroupEnded(draw=draw, domain=domain, members=members)


def kinds(instructions: list[Instruction]) -> list[str]:
    return [type(instruction).__name__ for instruction in instructions]


def draws(instructions: list[Instruction]) -> list[int]:
    return [one.draw for one in instructions if isinstance(one, (Draw, Reopen))]


# --- the synchronous loop by hand -------------------------------------------------------------


def test_one_synchronous_step_by_hand() -> None:
    h = Harness(LoopPlan(phases=(rl(steps=2),), save_every=1))
    assert draws(h.tell(Begin())) == [0, 1]
    assert h.end(1) == []
    out = h.end(0)
    assert kinds(out) == ["Train"]
    train = out[0]
    assert isinstance(train, Train)
    assert (train.step, train.version, [batch.draw for batch in train.batches]) == (1, 1, [0, 1])
    assert train.batches[0].keys == ("0.0", "0.1")
    assert h.tell(StepDone(changed=True)) == [Publish(version=1, parent=0, step=1)]
    assert h.tell(Published()) == [Save(step=1, version=1, next_draw=2)]
    assert draws(h.tell(Saved())) == [2, 3]
    h.end(2)
    h.end(3)
    h.tell(StepDone(changed=True))
    assert h.tell(Published()) == [Save(step=2, version=2, next_draw=4)]
    assert h.tell(Saved()) == [Stop(reason="done")]
    assert h.loop.stats().stage is Stage.STOPPED


def test_a_step_that_changes_nothing_publishes_nothing() -> None:
    h = Harness(LoopPlan(phases=(rl(),)))
    h.tell(Begin())
    h.end(0)
    h.end(1)
    assert draws(h.tell(StepDone(changed=False))) == [2, 3]
    assert h.loop.stats().version == 0
    assert h.loop.stats().step == 1


def test_evaluations_stand_at_their_named_points() -> None:
    plan = LoopPlan(phases=(sft(steps=1), rl(steps=1)), points=frozenset({"base", "sft", "rl"}))
    h = Harness(plan)
    assert h.tell(Begin()) == [Evaluate(point="base")]
    out = h.tell(Evaluated(point="base"))
    assert [one.phase for one in out if isinstance(one, Draw)] == [Phase.SFT, Phase.SFT]
    h.end(0, size=1)
    h.end(1, size=1)
    h.tell(StepDone(changed=True))
    assert kinds(h.tell(Published())) == ["Save"]
    assert h.tell(Saved()) == [Evaluate(point="sft")]
    out = h.tell(Evaluated(point="sft"))
    assert [one.phase for one in out if isinstance(one, Draw)] == [Phase.RL, Phase.RL]
    h.end(2)
    h.end(3)
    h.tell(StepDone(changed=True))
    h.tell(Published())
    assert h.tell(Saved()) == [Evaluate(point="rl")]
    assert h.tell(Evaluated(point="rl")) == [Stop(reason="done")]


def test_the_suite_is_run_every_so_many_steps_of_rl_on_saved_weights() -> None:
    plan = LoopPlan(phases=(sft(steps=1), rl(steps=5, groups=1)), evaluate_every=2)
    h = Harness(plan, position=Position(step=1, next_draw=0))
    h.tell(Begin())
    seen: list[tuple[int, Instruction]] = []
    for draw in range(5):
        h.end(draw)
        h.tell(StepDone(changed=True))
        out = h.tell(Published())
        while out and isinstance(out[0], Save | Evaluate):
            seen.append((h.loop.stats().step, out[0]))
            is_save = isinstance(out[0], Save)
            out = h.tell(Saved() if is_save else Evaluated(point=f"rl@{h.loop.stats().step}"))
    assert [(step, kinds([one])[0]) for step, one in seen] == [
        (3, "Save"),
        (3, "Evaluate"),
        (5, "Save"),
        (5, "Evaluate"),
        (6, "Save"),
    ]
    assert [one.point for _, one in seen if isinstance(one, Evaluate)] == ["rl@3", "rl@5"]


def test_a_resume_makes_up_for_an_evaluation_that_was_cut_short() -> None:
    plan = LoopPlan(phases=(rl(steps=5),), evaluate_every=2)
    assert Harness(plan, position=Position(step=2)).tell(Begin()) == [Evaluate(point="rl@2")]
    over = Harness(plan, position=Position(step=2, evaluated=frozenset({"rl@2"})))
    assert "Evaluate" not in kinds(over.tell(Begin()))


def test_a_batch_is_refilled_for_a_group_without_signal() -> None:
    h = Harness(LoopPlan(phases=(rl(),)))
    h.tell(Begin())
    h.end(0)
    out = h.end(1, outcome=Outcome.INFRA_FAILED, has_reward=False, error="lost")
    assert out == [
        DropMembers(draw=1, keys=("1.0", "1.1"), reason="infra_failed: lost"),
        Draw(draw=2, phase=Phase.RL, size=2),
    ]
    assert kinds(h.end(2)) == ["Train"]


def test_one_failed_member_is_dropped_and_the_rest_trains() -> None:  # BR-25
    h = Harness(LoopPlan(phases=(rl(groups=1, size=4),)))
    h.tell(Begin())
    members = tuple(
        Member(
            key=f"m{i}",
            outcome=Outcome.VERIFIER_FAILED if i == 2 else Outcome.SCORED,
            has_reward=i != 2,
            versions=(0,),
        )
        for i in range(4)
    )
    out = h.tell(GroupEnded(draw=0, domain="d", members=members))
    assert out[0] == DropMembers(draw=0, keys=("m2",), reason="verifier_failed")
    assert isinstance(out[1], Train)
    assert out[1].batches[0].keys == ("m0", "m1", "m3")


def test_a_single_survivor_has_nothing_to_be_compared_with() -> None:
    h = Harness(LoopPlan(phases=(rl(groups=1),)))
    h.tell(Begin())
    members = (
        Member(key="a", outcome=Outcome.SCORED, versions=(0,)),
        Member(key="b", outcome=Outcome.CANCELLED, has_reward=False),
    )
    out = h.tell(GroupEnded(draw=0, domain="d", members=members))
    assert kinds(out) == ["DropMembers", "DropGroup", "Draw"]


# --- asynchronous -----------------------------------------------------------------------------


def test_the_next_batch_is_generated_while_one_trains() -> None:
    h = Harness(LoopPlan(phases=(rl(steps=3, staleness=1),)))
    assert draws(h.tell(Begin())) == [0, 1, 2, 3]
    h.end(0)
    assert kinds(h.end(2)) == ["Train"]  # the first two that are ready
    h.end(1)
    assert draws(h.tell(StepDone(changed=True))) == [4, 5]  # while publishing
    out = h.tell(Published())
    assert out == []
    assert kinds(h.end(3)) == ["Train"]
    assert h.loop.stats().open == 2


def test_no_more_is_drawn_than_the_phase_needs() -> None:
    h = Harness(LoopPlan(phases=(rl(steps=2, groups=1, staleness=1),)))
    assert draws(h.tell(Begin())) == [0, 1]
    h.end(0)
    h.tell(StepDone(changed=True))
    h.tell(Published())
    h.end(1)
    h.tell(StepDone(changed=True))
    assert draws(h.said) == [0, 1]


def test_a_member_older_than_the_bound_is_dropped_when_it_would_train() -> None:  # BR-64
    h = Harness(LoopPlan(phases=(rl(steps=9, groups=1, staleness=1),)))
    h.tell(Begin())
    h.end(0)
    for _ in range(2):  # draw 1 waits over two updates
        h.tell(StepDone(changed=True))
        h.tell(Published())
        h.end(max(h.loop._shelf.open))
    late = group(1, versions=(0,))
    fresh = Member(key="1.2", outcome=Outcome.SCORED, versions=(1, 2))
    fresher = Member(key="1.3", outcome=Outcome.SCORED, versions=(2,))
    h.tell(GroupEnded(draw=1, domain="d", members=(*late.members, fresh, fresher)))
    assert DropMembers(draw=1, keys=("1.0", "1.1"), reason="stale") in h.said
    assert not any(isinstance(one, DropGroup) for one in h.said)


# --- sources, quarantine ----------------------------------------------------------------------


def test_a_dry_source_trains_what_there_is_and_says_so() -> None:  # BR-24
    h = Harness(LoopPlan(phases=(rl(steps=5, groups=4),)))
    h.tell(Begin())
    assert h.tell(SourceDry(draw=2, reason="10 of 10 prompts used")) == []
    h.tell(SourceDry(draw=3, reason="10 of 10 prompts used"))
    h.end(0)
    out = h.end(1)
    assert isinstance(out[0], Train)
    assert len(out[0].batches) == 2
    h.tell(StepDone(changed=True))
    out = h.tell(Published())
    assert isinstance(out[0], Warn)
    assert "ran dry in phase rl after step 1 of 5: 10 of 10" in out[0].message
    assert h.tell(Saved()) == [Stop(reason="done")]


def test_a_source_that_is_dry_at_once_ends_the_run() -> None:
    h = Harness(LoopPlan(phases=(rl(groups=1),)))
    h.tell(Begin())
    assert kinds(h.tell(SourceDry(draw=0, reason="no prompts"))) == ["Warn", "Stop"]


def test_a_domain_that_keeps_failing_is_quarantined_and_the_rest_goes_on() -> None:
    h = Harness(LoopPlan(phases=(rl(steps=50, groups=2, size=4),)))
    h.tell(Begin())
    bad, good = 0, 1
    for _ in range(3):
        h.end(good, size=4, domain="good")
        h.end(bad, size=4, domain="bad", outcome=Outcome.VERIFIER_FAILED, has_reward=False,
              error="it hung")  # fmt: skip
        h.end(max(h.loop._shelf.open), size=4, domain="good")
        h.tell(StepDone(changed=True))
        h.tell(Published())
        bad, good = sorted(h.loop._shelf.open)
    quarantines = [one for one in h.said if isinstance(one, Quarantine)]
    assert [one.domain for one in quarantines] == ["bad"]
    assert "it hung" in quarantines[0].evidence
    assert h.loop.stats().quarantined == ("bad",)
    assert h.loop.stats().step == 3


def test_failures_of_before_a_resume_count() -> None:
    before = Health()
    assert not before.record([Outcome.INFRA_FAILED] * 4)
    position = Position(step=1, next_draw=5, health={"d": before})
    h = Harness(LoopPlan(phases=(rl(groups=1, size=4),)), position=position)
    h.tell(Begin())
    out = h.end(5, size=4, domain="d", outcome=Outcome.INFRA_FAILED, has_reward=False)
    assert Quarantine(domain="d", evidence="8 of its last 8 attempts failed") in out


def test_a_domain_that_raises_is_dropped_with_the_message() -> None:
    h = Harness(LoopPlan(phases=(rl(groups=1, size=8),)))
    h.tell(Begin())
    out = h.tell(TaskFailed(draw=0, domain="bad", size=8, error="division by zero"))
    assert kinds(out) == ["DropGroup", "Quarantine", "Draw"]
    assert out[0] == DropGroup(draw=0, reason="domain_error: division by zero")


def test_the_run_fails_once_every_domain_is_quarantined() -> None:  # BR-24, A only
    h = Harness(LoopPlan(phases=(rl(groups=1, size=8),)))
    h.tell(Begin())
    h.tell(TaskFailed(draw=0, domain="bad", size=8, error="status 400"))
    out = h.tell(SourceDry(draw=1, reason="every domain is quarantined", healthy=False))
    assert out == [Stop(reason="failed: every domain is quarantined")]


# --- interruption and failure -----------------------------------------------------------------


def test_an_interrupt_while_collecting_finishes_the_step_saves_and_stops() -> None:
    h = Harness(LoopPlan(phases=(rl(),)))
    h.tell(Begin())
    h.end(0)
    assert h.tell(Interrupted()) == []
    assert kinds(h.end(1)) == ["Train"]
    h.tell(StepDone(changed=True))
    assert kinds(h.tell(Published())) == ["Save"]
    assert h.tell(Saved()) == [Stop(reason="interrupted")]
    assert not any(isinstance(one, DropGroup) for one in h.said)


def test_an_interrupt_while_training_ahead_draws_no_more() -> None:
    h = Harness(LoopPlan(phases=(rl(staleness=1),)))
    h.tell(Begin())
    h.end(0)
    h.end(1)
    h.tell(Interrupted())
    assert h.end(2) == []
    assert kinds(h.tell(StepDone(changed=True))) == ["Publish"]
    assert kinds(h.tell(Published())) == ["Save"]
    assert h.tell(Interrupted()) == []
    assert h.tell(Saved()) == [Stop(reason="interrupted")]


def test_an_interrupt_during_an_evaluation_stops_without_it() -> None:
    h = Harness(LoopPlan(phases=(rl(),), points=frozenset({"base"})))
    h.tell(Begin())
    assert h.tell(Interrupted()) == [Stop(reason="interrupted")]
    assert h.tell(Evaluated(point="base")) == []


def test_a_failed_step_saves_the_last_good_weights_and_stops() -> None:
    h = Harness(LoopPlan(phases=(rl(),)))
    h.tell(Begin())
    for draw in (0, 1):
        h.end(draw)
    h.tell(StepDone(changed=True))
    h.tell(Published())
    for draw in (2, 3):
        h.end(draw)
    assert kinds(h.tell(Failed(message="a gradient is NaN.", savable=True))) == ["Save"]
    assert h.tell(Saved()) == [Stop(reason="failed: a gradient is NaN.")]


def test_a_failing_save_stops_at_once_with_both_stories() -> None:
    h = Harness(LoopPlan(phases=(rl(groups=1),), save_every=1))
    h.tell(Begin())
    h.end(0)
    h.tell(StepDone(changed=True))
    h.tell(Published())
    assert h.tell(Failed(message="disk full.", savable=True)) == [Stop(reason="failed: disk full.")]
    h = Harness(LoopPlan(phases=(rl(groups=1),)))
    h.tell(Begin())
    h.end(0)
    h.tell(StepDone(changed=True))
    h.tell(Published())
    h.tell(Failed(message="NaN.", savable=True))
    out = h.tell(Failed(message="disk full.", savable=True))
    assert out == [Stop(reason="failed: NaN. Then: disk full.")]


def test_a_failure_without_whole_weights_does_not_save() -> None:
    h = Harness(LoopPlan(phases=(rl(),)))
    h.tell(Begin())
    out = h.tell(Failed(message="the ledger cannot be written.", savable=False))
    assert kinds(out) == ["Stop"]


def test_a_spent_budget_finishes_the_step_and_the_phase() -> None:
    h = Harness(LoopPlan(phases=(rl(steps=50, staleness=1),), points=frozenset({"rl"})))
    h.tell(Begin())
    h.end(0)
    h.end(1)
    assert h.tell(BudgetSpent()) == []
    h.tell(StepDone(changed=True))
    out = h.tell(Published())
    assert kinds(out) == ["DropGroup", "DropGroup", "Save"]
    assert h.tell(Saved()) == [Evaluate(point="rl")]
    assert h.tell(Evaluated(point="rl")) == [Stop(reason="done")]


def test_a_budget_spent_while_collecting_ends_the_phase_without_a_step() -> None:
    h = Harness(LoopPlan(phases=(rl(steps=50),)))
    h.tell(Begin())
    out = h.tell(BudgetSpent())
    assert out[:2] == [
        DropGroup(draw=0, reason="phase_over"),
        DropGroup(draw=1, reason="phase_over"),
    ]
    assert out[2:] == [Stop(reason="done")]


def test_an_event_of_another_stage_is_refused_with_the_story() -> None:
    h = Harness(LoopPlan(phases=(rl(),)))
    h.tell(Begin())
    for event in (Published(), Saved(), Evaluated(point="rl"), StepDone(changed=True), Begin()):
        with pytest.raises(IllegalTransitionError, match="while the loop was collecting"):
            h.loop.handle(event)


# --- going on after a resume ------------------------------------------------------------------


def test_pending_draws_come_first_and_in_order() -> None:
    position = Position(
        step=1,
        next_draw=9,
        pending=tuple(Pending(draw=d, phase=Phase.RL, domain="d") for d in (5, 2, 4)),
    )
    h = Harness(LoopPlan(phases=(rl(steps=4),)), position=position)
    assert h.tell(Begin()) == [Reopen(draw=2), Reopen(draw=4)]
    h.end(2)
    h.end(4)
    h.tell(StepDone(changed=True))
    assert h.tell(Published()) == [Reopen(draw=5), Draw(draw=9, phase=Phase.RL, size=2)]


def test_pending_draws_of_a_quarantined_domain_or_an_earlier_phase_are_dropped() -> None:
    position = Position(
        step=2,
        next_draw=9,
        pending=(
            Pending(draw=3, phase=Phase.SFT, domain="d"),
            Pending(draw=5, phase=Phase.RL, domain="bad"),
            Pending(draw=6, phase=Phase.RL, domain="d"),
        ),
        quarantined=frozenset({"bad"}),
    )
    h = Harness(LoopPlan(phases=(sft(steps=2), rl())), position=position)
    assert h.tell(Begin()) == [
        DropGroup(draw=3, reason="phase_over"),
        DropGroup(draw=5, reason="quarantined"),
        Reopen(draw=6),
        Draw(draw=9, phase=Phase.RL, size=2),
    ]


def test_a_finished_run_says_done_and_makes_up_a_missing_evaluation() -> None:
    plan = LoopPlan(phases=(rl(steps=4),), points=frozenset({"base", "rl"}))
    h = Harness(plan, position=Position(step=4, next_draw=8, evaluated=frozenset({"base"})))
    assert h.tell(Begin()) == [Evaluate(point="rl")]
    assert h.tell(Evaluated(point="rl")) == [Stop(reason="done")]
    h = Harness(plan, position=Position(step=4, evaluated=frozenset({"base", "rl"})))
    assert h.tell(Begin()) == [Stop(reason="done")]


def test_a_phase_that_goes_on_after_its_evaluation_is_evaluated_again_at_its_end() -> None:
    """With more steps in its configuration a run trained on and reported the earlier weights."""
    points = frozenset({"base", "sft", "rl"})
    plan = LoopPlan(phases=(sft(steps=1), rl(steps=2, groups=1)), points=points)
    h = Harness(plan, position=Position(step=2, next_draw=8, evaluated=points))
    h.tell(Begin())
    h.end(8)
    h.tell(StepDone(changed=True))
    assert kinds(h.tell(Published())) == ["Save"]
    assert h.tell(Saved()) == [Evaluate(point="rl")]
    assert h.tell(Evaluated(point="rl")) == [Stop(reason="done")]


# --- any schedule -----------------------------------------------------------------------------


@dataclass
class World:
    """A brute-force driver: carries instructions out in a random order and keeps count."""

    harness: Harness
    chance: random.Random
    bound: int
    versions: dict[int, int] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    trained: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    due: list[Event] = field(default_factory=list)
    drawn: int = 0
    stopped: str = ""

    def run(self, limit: int) -> None:
        self.carry(self.harness.tell(Begin()))
        for _ in range(limit):
            if self.stopped:
                return
            self.carry(self.harness.tell(self.event()))
        raise AssertionError("the loop did not come to an end")

    def event(self) -> Event:
        choices: list[Event | int] = [*self.due, *sorted(self.open)]
        assert choices, f"the loop waits for nothing: {self.harness.loop.stats()}"
        choice = self.chance.choice(choices)
        if isinstance(choice, Event):
            self.due.remove(choice)
            return choice
        draw = choice
        self.open.discard(draw)
        if self.chance.random() < 0.1:
            return TaskFailed(draw=draw, domain=f"d{draw % 3}", size=2, error="x")
        return self.ended(draw)

    def ended(self, draw: int) -> GroupEnded:
        lost = self.chance.random() < 0.15
        members = tuple(
            Member(
                key=f"{draw}.{i}",
                outcome=Outcome.INFRA_FAILED if lost and i else Outcome.SCORED,
                has_reward=not (lost and i),
                versions=(self.versions[draw], self.harness.lineage.current),
            )
            for i in range(2)
        )
        return GroupEnded(draw=draw, domain=f"d{draw % 9}", members=members)

    def carry(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            match one:
                case Draw() | Reopen():
                    if self.drawn >= 40:
                        self.due.append(SourceDry(draw=one.draw, reason="enough"))
                    else:
                        self.drawn += 1
                        self.versions[one.draw] = self.harness.lineage.current
                        self.open.add(one.draw)
                case Train():
                    self.train(one)
                    self.due.append(StepDone(changed=self.chance.random() < 0.9))
                case Publish():
                    self.due.append(Published())
                case Save():
                    self.due.append(Saved())
                case Evaluate():
                    self.due.append(Evaluated(point=one.point))
                case DropGroup():
                    self.open.discard(one.draw)
                    self.dropped.append(one.draw)
                case Stop():
                    self.stopped = one.reason
                case _:
                    pass

    def train(self, one: Train) -> None:
        self.batches.append(len(one.batches))
        for batch in one.batches:
            self.trained.append(batch.draw)
            age = self.harness.lineage.age(self.versions[batch.draw])
            assert age is not None
            assert age <= self.bound


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(0, 2), st.integers(0, 3), st.integers(1, 4), st.booleans()
)
def test_any_schedule_ends_and_trains_or_drops_each_group_once(
    seed: int, bound: int, sft_steps: int, groups: int, interrupt: bool
) -> None:
    plan = LoopPlan(
        phases=(
            PhasePlan(phase=Phase.SFT, steps=sft_steps, groups=groups, size=2, max_staleness=bound),
            rl(steps=4, groups=groups, staleness=bound),
        ),
        points=frozenset({"base", "sft", "rl"}),
        save_every=2,
    )
    world = World(Harness(plan), random.Random(seed), bound)
    if interrupt:
        world.due.append(Interrupted())
    world.run(2_000)
    assert len(world.trained) == len(set(world.trained))
    assert not set(world.trained) & set(world.dropped)
    assert all(size <= groups for size in world.batches)
    stats = world.harness.loop.stats()
    assert stats.step == len(world.batches)
    if world.stopped == "done" and world.drawn < 40:
        assert stats.step == sft_steps + 4
        assert set(world.batches) == {groups}
    assert world.stopped in ("done", "interrupted")
