"""Judging the attempts of a run again: new verdicts from what was kept, and what they change.

Nothing is overwritten and nothing is made again: a verdict is appended under the verifier of today,
and the newest one counts from then on (`Book.recall`). The one thing that must stay true: an
attempt is judged again from exactly what it said and left, or it is not, and the reason is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

from posttrain.core import events
from posttrain.core.containment import Sealed
from posttrain.core.errors import DomainError, InfraError
from posttrain.core.ports import Verifier
from posttrain.core.task import Environment, Place, Task
from posttrain.core.trajectory import AttemptKey, Trajectory
from posttrain.core.verdict import Component, Outcome, Verdict
from posttrain.evals.metrics import PASS_REWARD
from posttrain.loop.book import Book
from posttrain.loop.parts import Tasks
from posttrain.observe.kept import LetGoError
from posttrain.rollout.group import WORKSPACE

AT_ONCE = 8

Restore = Callable[[str, Environment], AbstractAsyncContextManager[Sealed]]
"""A kept workspace by its hash, sealed again. Raises KeyError where it is not there whole."""


class Standing(StrEnum):
    """What a reward amounts to."""

    PASS = "pass"
    FAIL = "fail"
    NONE = "none"
    """No signal."""


def standing(reward: float | None) -> Standing:
    """As evaluations count it.

    >>> [standing(reward).value for reward in (1.0, 0.5, None)]
    ['pass', 'fail', 'none']
    """
    if reward is None:
        return Standing.NONE
    return Standing.PASS if reward >= PASS_REWARD else Standing.FAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One attempt, judged again."""

    key: str
    domain: str
    before: float | None
    after: float | None
    step: int | None
    """The step that trained it, along the surviving lineage."""

    @property
    def flipped(self) -> bool:
        """Whether it passes now and did not, or the other way round."""
        return standing(self.before) is not standing(self.after)

    @property
    def changed(self) -> bool:
        """Whether its reward is another one."""
        return self.before != self.after


@dataclass(slots=True, kw_only=True)
class Reverification:
    """What judging again came to."""

    changes: list[Change] = field(default_factory=list)
    """One for each attempt that was judged again, changed or not."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Attempts that could not be, by reason."""
    remarks: Counter[str] = field(default_factory=Counter)

    def table(self) -> dict[str, Counter[tuple[Standing, Standing]]]:
        """Domain → (before, after) → attempts."""
        found: dict[str, Counter[tuple[Standing, Standing]]] = {}
        for change in sorted(self.changes, key=lambda change: change.domain):
            pair = standing(change.before), standing(change.after)
            found.setdefault(change.domain, Counter())[pair] += 1
        return found

    def affected_steps(self) -> dict[int, int]:
        """Step → how many attempts that it trained have another reward now; by step."""
        steps = Counter(one.step for one in self.changes if one.changed and one.step is not None)
        return dict(sorted(steps.items()))


def by_people(said: events.Relabelled) -> Verdict:
    """The verdict of a correction; one without a reward says that the task is broken.

    >>> by_people(events.Relabelled(key="ab", reward=0.0, reason="a forged result")).reward
    0.0
    """
    broken = said.reward is None
    part = Component(
        name="people",
        place=Place.PEOPLE,
        value=said.reward,
        evidence={} if broken else {"reason": said.reason},
        error=f"no signal: {said.reason}" if broken else None,
        verifier="people",
    )
    return Verdict(components=(part,))


class Reverifier:
    """Judges finished attempts of one run again."""

    def __init__(
        self,
        book: Book,
        *,
        verifier: Verifier,
        tasks: Tasks,
        restore: Restore,
        corrections: Mapping[str, events.Relabelled] | None = None,
    ) -> None:
        """`tasks` makes a draw's task as its domain makes it today; `corrections`: attempt key →
        what people said it deserves, which no verifier is asked about any more.
        """
        self._corrections = corrections or {}
        self._book = book
        self._verifier = verifier
        self._tasks = tasks
        self._restore = restore
        self._room = asyncio.Semaphore(AT_ONCE)

    async def run(
        self, *, domains: Sequence[str] = (), told: Callable[[int, int], None] = lambda *_: None
    ) -> Reverification:
        """Judge all finished attempts again, or those of some domains. `told`: done, and in all.

        Raises:
            LedgerError: a verdict cannot be written down; those before it are.
        """
        found = Reverification()
        past = self._book.past
        drawn = [d for d in past.draws.values() if not domains or d.domain in domains]
        for done, draw in enumerate(drawn, 1):
            keys = list(past.statuses(draw.draw))
            changes = await asyncio.gather(
                *(self._again(key, draw, found) for key in keys), return_exceptions=True
            )
            for change in changes:
                if isinstance(change, BaseException):
                    raise change
                found.changes += [change] if change else []
            told(done, len(drawn))
        self._book.sync()
        return found

    async def _again(
        self, key: AttemptKey, drawn: events.Drawn, found: Reverification
    ) -> Change | None:
        attempt = self._book.past.account.attempt(key.hex)
        if attempt is None or attempt.finished is None:
            found.left_out["never finished"] += 1
            return None
        old = self._book.recall(key)
        if old is None:
            found.left_out["its record in the journal is lost"] += 1
            return None
        if old.outcome not in (Outcome.SCORED, Outcome.VERIFIER_FAILED):
            found.left_out[f"{old.outcome}: there is nothing to judge"] += 1
            return None
        said = self._corrections.get(key.hex)
        if said is not None and said.place in ("", attempt.finished.place):
            found.remarks["judged by people"] += 1
            verdict = by_people(said)
        else:
            async with self._room:
                task = await self._task(drawn, old.task, found)
                try:
                    async with self._left(old, task) as sealed:
                        verdict = await self._verifier.verify(replace(old, task=task), sealed)
                except LetGoError as error:
                    found.left_out[f"its workspace: {error}"] += 1
                    return None
                except (KeyError, InfraError) as error:
                    found.left_out[f"what it left is not there: {error}"[:120]] += 1
                    return None
        event = self._book.reverified(key, verdict)
        return Change(
            key=key.hex,
            domain=drawn.domain,
            before=old.reward,
            after=event.reward,
            step=attempt.step,
        )

    async def _task(self, drawn: events.Drawn, old: Task, found: Reverification) -> Task:
        """The task as it was attempted, with the checks that its domain gives it today."""
        try:
            now = await self._tasks.task(drawn)
        except DomainError as error:
            found.remarks[f"judged by the checks of then: {error.message}"[:160]] += 1
            return old
        if now.content_key != old.content_key:
            found.remarks["judged by the checks of then: its domain makes another task now"] += 1
            return old
        return replace(old, checks=now.checks, private=now.private)

    @asynccontextmanager
    async def _left(self, old: Trajectory, task: Task) -> AsyncIterator[Sealed | None]:
        """What the attempt left, sealed again; None where it had no sandbox."""
        if task.environment is None:
            yield None
            return
        kept = old.artefacts.get(WORKSPACE, {})
        if "sha256" not in kept:
            raise KeyError(kept.get("lost", "it was not kept"))
        async with self._restore(str(kept["sha256"]), task.environment) as sealed:
            yield sealed
