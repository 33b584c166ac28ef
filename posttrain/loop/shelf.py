"""The groups that are under way: open, ready, in training, and waiting since before a resume.

It decides nothing about phases and steps (`loop.state` does). The one thing that must stay true: a
draw is in one place at most, and what leaves the shelf untrained is named in an instruction.
"""

from __future__ import annotations

from collections.abc import Iterable

from posttrain.loop.moves import (
    Batch,
    DropGroup,
    DropMembers,
    GroupEnded,
    Hold,
    Instruction,
    Member,
    Pending,
    Phase,
    PhasePlan,
)
from posttrain.schedule.staleness import Freshness, Lineage, Staleness

HELD = "held"
"""Why groups of a domain under alarm are dropped."""


class Shelf:
    """Groups by draw. `open` is written by the loop: what it asked for and did not yet get. `held`
    are the domains that are kept out of training.
    """

    def __init__(
        self, lineage: Lineage, *, waiting: Iterable[Pending] = (), held: Iterable[str] = ()
    ) -> None:
        self._lineage = lineage
        self.held = set(held)
        self._domains: dict[int, str] = {}
        self.open: set[int] = set()
        self.ready: dict[int, tuple[Member, ...]] = {}
        self.training: tuple[int, ...] = ()
        self.waiting = sorted(waiting, key=lambda pending: pending.draw)

    @property
    def under_way(self) -> int:
        """Groups open, ready or in training."""
        return len(self.open) + len(self.ready) + len(self.training)

    def draws(self) -> set[int]:
        """Every draw on the shelf."""
        waiting = {pending.draw for pending in self.waiting}
        return waiting.union(self.open, self.ready, self.training)

    def is_exhausted(self, phase: Phase) -> bool:
        """Whether no group of the phase will ever become ready without a new draw."""
        return not self.open and all(pending.phase is not phase for pending in self.waiting)

    def take_in(self, event: GroupEnded) -> list[Instruction]:
        """An open group ended; it is ready until `sift` looks at it. Its alarm holds its domain."""
        self.open.remove(event.draw)
        self.ready[event.draw] = event.members
        self._domains[event.draw] = event.domain
        if not event.alarm or event.domain in self.held:
            return []
        self.held.add(event.domain)
        return [Hold(domain=event.domain, evidence=event.alarm)]

    def sift(self, plan: PhasePlan) -> list[Instruction]:
        """Drop ready groups of held domains, members that give no signal or are too old, and groups
        with too few left to compare (fewer than two, where the group has two or more).
        """
        staleness = Staleness(self._lineage, bound=plan.max_staleness)
        out: list[Instruction] = []
        self._domains = {draw: self._domains[draw] for draw in self.ready}
        for draw, members in sorted(self.ready.items()):
            if self._domains[draw] in self.held:
                del self.ready[draw]
                out.append(DropGroup(draw=draw, reason=HELD))
                continue
            reasons = {member.key: _reason(member, staleness) for member in members}
            for reason in dict.fromkeys(reason for reason in reasons.values() if reason):
                keys = tuple(key for key, why in reasons.items() if why == reason)
                out.append(DropMembers(draw=draw, keys=keys, reason=reason))
            kept = tuple(member for member in members if not reasons[member.key])
            self.ready[draw] = kept
            if len(kept) < min(2, plan.size):
                del self.ready[draw]
                if kept:
                    out.append(DropGroup(draw=draw, reason="too_few_members"))
        return out

    def pop_batch(self, groups: int) -> tuple[Batch, ...]:
        """The lowest ready draws, at most `groups` of them, go into training."""
        self.training = tuple(sorted(self.ready)[:groups])
        return tuple(
            Batch(draw=draw, keys=tuple(member.key for member in self.ready.pop(draw)))
            for draw in self.training
        )

    def pop_waiting(self, phases: set[Phase], *, at_most: int | None = None) -> list[Pending]:
        """Waiting draws of these phases leave the shelf, lowest first."""
        popped = [pending for pending in self.waiting if pending.phase in phases][:at_most]
        self.waiting = [pending for pending in self.waiting if pending not in popped]
        return popped

    def clear(self) -> list[int]:
        """Open and ready groups leave the shelf; their draws, lowest first."""
        left = sorted({*self.open, *self.ready})
        self.open.clear()
        self.ready.clear()
        return left

    def check(self) -> None:
        """Invariant: a draw is in one place."""
        places = len(self.waiting) + self.under_way
        assert places == len(self.draws()), "a draw is in one place"


def _reason(member: Member, staleness: Staleness) -> str:
    """Why a member cannot be trained on, or ''."""
    if not member.has_reward:
        return f"{member.outcome}: {member.error}" if member.error else str(member.outcome)
    freshness = staleness.judge(member.versions)
    return "" if freshness is Freshness.FRESH else str(freshness)
