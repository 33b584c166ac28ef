"""The desk at which people review a run: its index, its queue, and the file of reviews.

What was decided goes to `review.jsonl`, which is written like a ledger, one event at a time. The
run's own ledger belongs to the training process and is only read here. The one thing that must stay
true: between looking at the queue and writing an event down nobody else writes one, so two people
never hold the same attempt.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from posttrain.core import codec
from posttrain.core.events import Claimed, Controlled, LedgerEvent, decode
from posttrain.core.task import Json, Place
from posttrain.core.trajectory import Trajectory
from posttrain.core.verdict import Outcome, Verdict
from posttrain.evals.rates import deserves
from posttrain.evals.review import Item, Label, Queue
from posttrain.evals.selection import Alarm, Facts, ReviewPlan, Voices, select
from posttrain.observe import index
from posttrain.observe.index import REVIEWS, Index
from posttrain.observe.journal import FileJournal
from posttrain.observe.ledger import FileLedger

ALARMS = ("hold", "quarantine")
"""Actions of controls that are alarms."""
PLANNED = "review"
"""Action of the control that holds a plan other than the usual one."""
CONTRASTING = 2

E = TypeVar("E", bound=LedgerEvent)


class Desk:
    """The reviews of one run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = Index(folder)
        self._journal = FileJournal(folder / "journal")

    def queue(self) -> Queue:
        """The queue as the files on the disk say.

        Raises:
            LedgerError: they are damaged.
            PreflightError: the index cannot be written.
        """
        self._index.refresh()
        c = index.reviews.c
        rows = self._index.rows(sa.select(c.at, c.event).order_by(c.file, c.at))
        history = [(row.at, decode(row.event)) for row in rows]
        controls = [(at, event) for at, event in history if isinstance(event, Controlled)]
        plans = [event.arguments for _, event in controls if event.action == PLANNED]
        plan = ReviewPlan(**plans[-1]) if plans else ReviewPlan()
        alarms = [
            Alarm(str(event.arguments.get("domain", "")), at, event.action)
            for at, event in controls
            if event.action in ALARMS
        ]
        facts = self._facts()
        chosen = select(facts, voices=self._voices(), alarms=alarms, plan=plan)
        return Queue(facts, chosen, [event for _, event in history], plan=plan)

    def write(self, decide: Callable[[Queue], E | None]) -> tuple[Queue, E | None]:
        """Ask the queue for an event and write it down, alone; the queue with it, and the event.

        Raises:
            UsageError: the queue refuses.
            LedgerError: it cannot be written.
        """
        with self._alone():
            queue = self.queue()
            event = decide(queue)
            held = isinstance(event, Claimed) and queue.find(event.key).claim == event
            if event is not None and not held:
                self._append([event])
                queue.apply(event)
        return queue, event

    def plan(self, plan: ReviewPlan) -> None:
        """From now on so much is reviewed."""
        with self._alone():
            self._append([Controlled(action=PLANNED, arguments=asdict(plan))])

    def relabel(self) -> int:
        """Write down the rewards that labels correct; how many."""
        with self._alone():
            corrected = self.queue().relabel()
            self._append(corrected)
        return len(corrected)

    def trajectory(self, key: str) -> Trajectory | None:
        """What an attempt said, under the verdict that counts; None where the journal lost it."""
        columns = index.attempts.c
        wanted = sa.select(columns.place, columns.verdict_place, columns.outcome)
        (row,) = self._index.rows(wanted.where(columns.key == key))
        note = self._journal.read(row.place) if row.place else None
        if note is None or note.key != key:
            return None
        try:
            found = codec.from_json(Trajectory, note.data)
            later = self._journal.read(row.verdict_place) if row.verdict_place else None
            if later is None:
                return found
            return found.judged(codec.from_json(Verdict, later.data), Outcome(row.outcome))
        except (TypeError, ValueError):
            return None

    def contrast(self, item: Item) -> list[tuple[float, Trajectory]]:
        """Others at the same task, with their rewards: the most different one, the most alike."""
        columns, own = index.attempts.c, item.facts
        same = sa.select(columns.draw).where(columns.key == own.key).scalar_subquery()
        wanted = sa.select(columns.key, columns.reward).where(
            columns.draw == same, columns.key != own.key, columns.reward.is_not(None)
        )
        rows = sorted(self._index.rows(wanted), key=lambda row: -abs(row.reward - own.reward))
        picked = [*rows[:1], *rows[:0:-1]][:CONTRASTING]
        found = ((row.reward, self.trajectory(row.key)) for row in picked)
        return [(reward, one) for reward, one in found if one is not None]

    # --- what the index says ------------------------------------------------------------------

    def _facts(self) -> list[Facts]:
        columns = index.attempts.c
        names = [columns[name] for name in Facts._fields if name != "verifier"]
        scored = columns.phase != "sft", columns.reward.is_not(None)
        rows = self._index.rows(sa.select(*names, columns.verifiers).where(*scored))
        return [Facts._make(row) for row in rows]

    def _voices(self) -> list[Voices]:
        """Verdicts whose components are not of one mind."""
        c = index.components.c
        judge = sa.func.avg(sa.case((c.place == Place.JUDGE.value, c.value)))
        program = sa.func.avg(sa.case((c.place != Place.JUDGE.value, c.value)))
        least, most = sa.func.min(c.value), sa.func.max(c.value)
        heard = c.gate == 0, c.weight > 0, c.value.is_not(None)
        wanted = sa.select(c.key, least, most, judge, program).where(*heard).group_by(c.key)
        return [Voices._make(row) for row in self._index.rows(wanted.having(least < most))]

    # --- writing ------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Others who would write wait; it ends with the process at the latest."""
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _append(self, events: Iterable[LedgerEvent]) -> None:
        with FileLedger(self._folder / REVIEWS) as file:
            for event in events:
                file.append(event)
            file.sync()

    # --- what labels are good for -------------------------------------------------------------

    def fixtures(self, items: Iterable[Item]) -> dict[str, Json]:
        """File name → attacker fixture: hacks and false accepts, as `domains check` reads them."""
        found = {}
        for item in items:
            label = item.settled
            if label is None or label.label not in (Label.HACK, Label.FALSE_ACCEPT):
                continue
            made = self.trajectory(item.facts.key)
            if made is not None:
                name = f"{item.facts.domain}-{item.facts.key[:12]}.json".replace("/", "_")
                found[name] = {**_task(item), "reason": label.reason, "turns": _turns(made)}
        return found

    def preferences(self, items: Sequence[Item]) -> Iterator[dict[str, Json]]:
        """Records to train a reward model on: what each labelled attempt deserves, and pairs of
        attempts at one task of which one deserves more.
        """
        tasks: dict[str, list[tuple[float, dict[str, Json]]]] = {}
        for item in items:
            reward, made = deserves(item), None
            if reward is not None and item.settled is not None:
                made = self.trajectory(item.facts.key)
            if made is None or reward is None or item.settled is None:
                continue
            said: dict[str, Json] = {"key": item.facts.key, "turns": _turns(made)}
            prompt = codec.to_json(made.task.description)
            head = {**_task(item), "prompt": prompt, "reason": item.settled.reason}
            yield {"kind": "label", **head, **said, "label": item.settled.label, "reward": reward}
            others = tasks.setdefault(made.task.content_key, [])
            for other, theirs in others:
                if other != reward:
                    better, worse = (said, theirs) if reward > other else (theirs, said)
                    pair = {"chosen": better, "rejected": worse}
                    yield {"kind": "pair", **_task(item), "prompt": prompt, **pair}
            others.append((reward, said))


def _task(item: Item) -> dict[str, Json]:
    return {"domain": item.facts.domain, "level": item.facts.level, "seed": item.facts.seed}


def _turns(made: Trajectory) -> list[Json]:
    return [
        {"text": turn.text, "tool_calls": codec.to_json(turn.tool_calls)} for turn in made.turns
    ]
