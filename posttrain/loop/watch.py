"""Feeds the run-time monitor (`verify.monitor`) with the groups of a run.

It holds nothing: the loop does. The one thing that must stay true: a domain the ledger calls
released begins with a new reference, whatever the checkpoint's monitor says of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.core.events import Drawn
from posttrain.core.task import Json
from posttrain.core.trajectory import Trajectory
from posttrain.evals import metrics
from posttrain.evals.metrics import Evaluation
from posttrain.loop.book import Book
from posttrain.loop.moves import Phase
from posttrain.verify.monitor import Monitor, State
from posttrain.verify.signals import seen
from posttrain.verify.stack import version


class Watch:
    """The monitor of one run."""

    def __init__(
        self, book: Book, saved: Mapping[str, Json] | None = None, *, hold: bool = True
    ) -> None:
        """`saved`: what `save` gave to the checkpoint that the run goes on from; without `hold`
        an alarm is a warning.
        """
        self._book = book
        self._hold = hold
        self._monitor = Monitor.load(saved["monitor"]) if saved else Monitor()
        self._counted = set[int](saved["counted"] if saved else ())
        """Draws whose group was taken in and is not settled: a resume ends some of them again."""
        before = saved["released"] if saved else {}
        for domain, times in book.past.released.items():
            if times > before.get(domain, 0):
                self._monitor.release(domain)
        for domain in book.past.quarantined:
            self._monitor.quarantine(domain)

    def take(self, drawn: Drawn, members: Sequence[Trajectory]) -> str:
        """Take in a group that ended; the evidence where its domain is to be held, else ''."""
        group = [one for member in members if (one := seen(member)) is not None]
        if drawn.phase != Phase.RL or not group or drawn.draw in self._counted:
            return ""
        self._counted.add(drawn.draw)
        judged_by = version(members[0].task)
        decision = self._monitor.take(drawn.domain, judged_by, group, level=drawn.level)
        if decision is None:
            return ""
        self._book.note(
            "monitor",
            {
                "domain": drawn.domain,
                "state": str(decision.state),
                "evidence": decision.evidence,
                "accepts": list(decision.accepts),
                "rejects": list(decision.rejects),
            },
        )
        if decision.state is not State.ALARM:
            return ""
        if not self._hold:
            told = "it is trained on all the same, as rl.hold_alarms is false"
            self._book.warn(f"Alarm for domain {drawn.domain} ({told}): {decision.evidence}")
        return decision.evidence if self._hold else ""

    def compare(self, evaluation: Evaluation) -> None:
        """Take in what held-out tasks show of the present weights."""
        for domain, score in metrics.scores(evaluation).items():
            self._monitor.compare(domain, passed=score.passed, tasks=score.scored)

    def save(self) -> Mapping[str, Json]:
        """For a checkpoint."""
        past = self._book.past
        self._counted = {draw for draw in self._counted if not past.is_settled(draw)}
        return {
            "monitor": self._monitor.save(),
            "released": dict(past.released),
            "counted": sorted(self._counted),
        }
