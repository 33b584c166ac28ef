"""Carrying out what concerns groups: deciding a draw, making its task and attempts, dropping them.

It chooses nothing: which draws, when, and what is dropped are instructions. The one thing that
must stay true: an attempt is in the ledger before it is made, and a trajectory that was made is in
the journal before the ledger calls it finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from posttrain.core import events
from posttrain.core.errors import DomainError
from posttrain.core.ports import AttemptRequest
from posttrain.core.task import Task
from posttrain.core.trajectory import AttemptKey, Group, Trajectory
from posttrain.core.verdict import Outcome
from posttrain.loop.book import Book
from posttrain.loop.moves import (
    Batch,
    Draw,
    DropGroup,
    DropMembers,
    Event,
    GroupEnded,
    Member,
    Phase,
    SourceDry,
    TaskFailed,
)
from posttrain.loop.parts import Parts
from posttrain.loop.watch import Watch
from posttrain.schedule.account import Status

ORACLE_REWARD = 1.0 - 1e-6
"""What an oracle must earn to be imitated."""
SHOWN = 3
"""Most quarantined domains that one message tells of."""

Tell = Callable[[Event | Exception], None]


@dataclass(slots=True, kw_only=True)
class _Group:
    """One draw under way."""

    drawn: events.Drawn
    task: Task | None = None
    members: dict[str, Trajectory] = field(default_factory=dict)
    """By attempt key; those that came to an end."""
    maker: asyncio.Task[None] | None = None


class Attempts:
    """Groups under way. `tell` takes what happens, errors the run cannot survive included."""

    def __init__(
        self,
        parts: Parts,
        book: Book,
        tell: Tell,
        *,
        on_finished: Callable[[Trajectory], None],
        watch: Watch,
    ) -> None:
        self._parts = parts
        self._book = book
        self._tell = tell
        self._on_finished = on_finished
        self._watch = watch
        self._groups: dict[int, _Group] = {}

    # --- instructions -------------------------------------------------------------------------

    def draw(self, instruction: Draw) -> None:
        """Decide a draw, account for it, and begin to make it."""
        past = self._book.past
        source = self._parts.sources[instruction.phase]
        out = frozenset(past.quarantined | past.held)
        decision = source.draw(instruction.draw, without=out)
        if decision is None:
            self._tell(self._dry(instruction))
            return
        self._book.drawn(instruction, decision)
        self._begin(_Group(drawn=past.draws[instruction.draw]), fresh=True)

    def reopen(self, draw: int) -> None:
        """Go on with a draw of before the resume."""
        self._begin(_Group(drawn=self._book.past.draws[draw]), fresh=False)

    def drop_members(self, instruction: DropMembers) -> None:
        """These attempts are never trained."""
        self._book.dropped(instruction.keys, instruction.reason)

    def drop_group(self, instruction: DropGroup) -> None:
        """End what is still being made of a draw, and drop all of it."""
        group = self._groups.pop(instruction.draw, None)
        if group is not None and group.maker is not None:
            group.maker.cancel()
        keys = [key.hex for key in self._book.past.statuses(instruction.draw)]
        self._book.dropped(keys, instruction.reason)

    def take(self, batch: Batch) -> Group:
        """The group a step trains on, with the members named; it leaves this object."""
        group = self._groups.pop(batch.draw)
        assert group.task is not None, "a group that ended has a task"
        members = tuple(group.members[key] for key in batch.keys)
        return Group(draw=batch.draw, task=group.task, members=members)

    async def close(self) -> None:
        """End everything that is still being made; it stays pending."""
        makers = [group.maker for group in self._groups.values() if group.maker is not None]
        self._groups.clear()
        for maker in makers:
            maker.cancel()
        await asyncio.gather(*makers, return_exceptions=True)

    # --- making a group -----------------------------------------------------------------------

    def _dry(self, instruction: Draw) -> SourceDry:
        source = self._parts.sources[instruction.phase]
        if source.draw(instruction.draw, without=frozenset()) is None:
            return SourceDry(draw=instruction.draw, reason="there are no more tasks to draw.")
        out = self._book.past.quarantined | self._book.past.held
        told = [f"{name} ({why})" for name, why in out.items()]
        more = f"; and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
        return SourceDry(
            draw=instruction.draw,
            reason=f"every domain left is quarantined or held: {'; '.join(told[:SHOWN])}{more}.",
            healthy=False,
        )

    def _begin(self, group: _Group, *, fresh: bool) -> None:
        self._groups[group.drawn.draw] = group
        group.maker = asyncio.create_task(self._guarded(self._make(group, fresh=fresh)))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._tell(error)

    async def _make(self, group: _Group, *, fresh: bool) -> None:
        drawn = group.drawn
        try:
            group.task = await self._parts.tasks.task(drawn)
        except DomainError as error:
            failed = TaskFailed(
                draw=drawn.draw, domain=drawn.domain, size=drawn.size, error=str(error)
            )
            self._tell(failed)
            return
        phase = Phase(drawn.phase)
        if requests := self._requests(group, group.task, fresh=fresh):
            made = await self._parts.groups[phase].run(requests, self._finished)
            group.members |= {member.key.hex: member for member in made.members}
        members = sorted(group.members.values(), key=lambda trajectory: trajectory.key.member)
        self._tell(
            GroupEnded(
                draw=drawn.draw,
                domain=drawn.domain,
                members=tuple(member_of(trajectory, phase) for trajectory in members),
                alarm=self._watch.take(drawn, members),
            )
        )

    def _requests(self, group: _Group, task: Task, *, fresh: bool) -> list[AttemptRequest]:
        """What has to be made; what was finished before a resume and is still good is reused."""
        requests = []
        for key, status in self._book.past.statuses(group.drawn.draw).items():
            if status in (Status.TRAINED, Status.DROPPED):
                continue
            old = self._book.recall(key) if status is Status.FINISHED else None
            if old is not None and self._is_good(old, task):
                group.members[key.hex] = old
                continue
            tries = 1 if fresh else self._book.entered(key)
            requests.append(self._request(key, task, tries, Phase(group.drawn.phase)))
        return requests

    def _request(self, key: AttemptKey, task: Task, tries: int, phase: Phase) -> AttemptRequest:
        sampling = self._parts.sampling[phase]
        return AttemptRequest(key=key, task=task, sampling=sampling, tries=tries)

    def _is_good(self, trajectory: Trajectory, task: Task) -> bool:
        """Whether it was made at the task as it is now, and no token was sampled by weights that
        were rolled back.
        """
        lineage = self._book.past.lineage
        versions = (version for version in trajectory.versions() if version >= 0)
        same = trajectory.task.content_key == task.content_key
        return same and all(lineage.age(version) is not None for version in versions)

    def _finished(self, trajectory: Trajectory) -> None:
        group = self._groups.get(trajectory.key.draw)
        if group is None or trajectory.outcome is Outcome.CANCELLED:
            return  # dropped, or the run stops: then it stays pending
        self._book.finished(trajectory)
        group.members[trajectory.key.hex] = trajectory
        self._on_finished(trajectory)


def member_of(trajectory: Trajectory, phase: Phase) -> Member:
    """What the loop needs to know of an attempt that ended. An oracle that does not earn its
    reward is a failure of its domain, never a thing to imitate.
    """
    outcome = trajectory.outcome or Outcome.CANCELLED
    reward, error = trajectory.reward, trajectory.error or ""
    if phase is Phase.SFT and reward is not None and reward < ORACLE_REWARD:
        outcome = Outcome.VERIFIER_FAILED
        error = f"the oracle earned {reward:g} ({trajectory.stop})"
    return Member(
        key=trajectory.key.hex,
        outcome=outcome,
        versions=trajectory.versions(),
        has_reward=outcome.has_reward and reward is not None,
        error=error,
    )
