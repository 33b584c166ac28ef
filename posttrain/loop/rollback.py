"""Taking a run back to one of its checkpoints, so that it goes on from there in a new lineage.

Nothing is lost: the ledger is appended to, checkpoints of the abandoned lineage are moved aside,
and attempts that were sampled by weights which remain are trained again under the rewards that
count by then. The one thing that must stay true: the ledger says so before anything is moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from posttrain.core import events
from posttrain.core.errors import UsageError
from posttrain.core.ports import Ledger
from posttrain.loop.past import Past
from posttrain.train.checkpoint import PREFIX

ROLLBACK = "rollback"
"""`Controlled.action` under which a rollback is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """What taking a run back came to."""

    step: int
    version: int
    before: int
    """The step it stood at."""
    released: int
    """Attempts that wait to be trained again, or dropped."""
    aside: tuple[Path, ...]
    """Where the checkpoints of the abandoned lineage are now."""


def kept(folder: Path, past: Past) -> dict[int, events.Saved]:
    """Step → checkpoint of the surviving lineage that is still on the disk."""
    return {saved.step: saved for saved in past.saved if (folder / saved.path).is_dir()}


def roll_back(folder: Path, ledger: Ledger, past: Past, *, to: int, reason: str = "") -> Rollback:
    """Go back to the newest checkpoint at or before step `to`; 0 is the beginning.

    Raises:
        UsageError: the run is not past that step, or keeps no checkpoint there.
        LedgerError: it cannot be written down.
    """
    before = past.account.step
    if not 0 <= to < before:
        raise UsageError(f"the run stands at step {before}, and cannot go back to {to}.",
                         f"name a step from 0 to {before - 1}")  # fmt: skip
    there = kept(folder, past)
    chosen = there.get(max((step for step in there if step <= to), default=0))
    if chosen is None and to > 0:
        listed = ", ".join(str(step) for step in there if step < before) or "none"
        raise UsageError(f"no checkpoint at or before step {to} is kept (there are: {listed}).",
                         "name one of these, or 0; run.keep keeps more")  # fmt: skip
    step, version = (chosen.step, chosen.version) if chosen else (0, 0)
    trained = past.account.stats().trained
    moved = {"from": before, "to": step, "reason": reason}
    for event in (
        events.Controlled(action=ROLLBACK, arguments=moved),
        events.Rewound(step=step, version=version),
    ):
        past.apply(event)
        ledger.append(event)
    ledger.sync()
    return Rollback(
        step=step,
        version=version,
        before=before,
        released=trained - past.account.stats().trained,
        aside=_set_aside(folder / "checkpoints", after=step),
    )


def _set_aside(checkpoints: Path, *, after: int) -> tuple[Path, ...]:
    """Move checkpoints of later steps out of the way of those that the new lineage makes."""
    number = 1 + sum(1 for _ in checkpoints.glob("rolled-back-*"))
    aside, moved = checkpoints / f"rolled-back-{number}", []
    for path in sorted(checkpoints.glob(f"{PREFIX}*")):
        digits = path.name.removeprefix(PREFIX)
        if digits.isdecimal() and int(digits) > after:
            aside.mkdir(exist_ok=True)
            moved.append(path.rename(aside / path.name))
    return tuple(moved)
