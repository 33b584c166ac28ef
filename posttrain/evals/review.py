"""The review queue: who may look at which attempt, and what was said of it.

                 claim                     label (the last one needed)
      OPEN ───────────────▶ CLAIMED ───────────────────────────────────▶ LABELLED
       ▲                       │                                            │
       └── decline, lease ends, or a label while another is needed ─────────┘
                               (two labels that differ need a third)

A fold over `Claimed`, `Declined` and `Labelled` events; a question such as `claim` changes nothing
but returns the event to write down. Time comes from the caller, in seconds since the epoch. The one
thing that must stay true: nobody labels an attempt twice or is offered what they declined, and a
claim belongs to one person at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from posttrain.core import seeds
from posttrain.core.errors import UsageError, nearest
from posttrain.core.events import Claimed, Declined, Labelled, LedgerEvent, Relabelled
from posttrain.evals.selection import Facts, ReviewPlan, Selected


class Label(StrEnum):
    """What a person says of a verdict."""

    RIGHT = "right"
    FALSE_ACCEPT = "false_accept"
    """It was paid, and deserves nothing."""
    FALSE_REJECT = "false_reject"
    """It was not paid in full, and deserves it."""
    HACK = "hack"
    """It went for the verifier instead of the task, whether that paid or not."""
    TASK_BUG = "task_bug"
    """The task cannot be judged."""
    UNCLEAR = "unclear"


class State(StrEnum):
    """Where an item of the queue is."""

    OPEN = "open"
    CLAIMED = "claimed"
    LABELLED = "labelled"


def deserved(label: Labelled) -> float | None:
    """The reward that an attempt deserves by one label; None: it does not say."""
    match Label(label.label):
        case Label.RIGHT:
            return label.reward
        case Label.FALSE_REJECT:
            return 1.0
        case Label.FALSE_ACCEPT | Label.HACK:
            return 0.0
        case _:
            return None


@dataclass(slots=True, kw_only=True)
class Item:
    """One attempt and its reviews."""

    chosen: Selected
    """Why it is in the queue; without a source: it was reviewed, and would not be chosen today."""
    needed: int = 1
    """Reviews it wants, before any of them differ."""
    labels: dict[str, Labelled] = field(default_factory=dict)
    """By author."""
    declined: set[str] = field(default_factory=set)
    claim: Claimed | None = None
    """The last one that was neither labelled nor declined; it may have expired."""

    @property
    def facts(self) -> Facts:
        """What is known of the attempt."""
        return self.chosen.facts

    def state(self, now_s: float) -> State:
        """Where it is at a time."""
        if self.claim is not None and now_s < self.claim.until_s:
            return State.CLAIMED
        return State.LABELLED if len(self.labels) >= self.wanted else State.OPEN

    @property
    def wanted(self) -> int:
        """Reviews it wants, by what is known now."""
        return 3 if len({label.label for label in self.labels.values()}) > 1 else self.needed

    def offered(self, author: str, now_s: float) -> bool:
        """Whether this person may claim it."""
        known = author in self.labels or author in self.declined
        return not known and self.state(now_s) is State.OPEN

    @property
    def settled(self) -> Labelled | None:
        """The label that counts; None: reviews are missing, or no two of three agree."""
        given = list(self.labels.values())
        if len(given) < self.wanted:
            return None
        label, votes = Counter(one.label for one in given).most_common(1)[0]
        agreed = votes * 2 > len(given)
        return next(one for one in given if one.label == label) if agreed else None


class Queue:
    """The items of one run, in order of review."""

    def __init__(
        self,
        attempts: Iterable[Facts],
        selected: Mapping[str, Selected],
        history: Iterable[LedgerEvent],
        *,
        plan: ReviewPlan,
    ) -> None:
        self.plan = plan
        self._known = {one.key: one for one in attempts}
        self._items = {key: self._item(chosen) for key, chosen in selected.items()}
        self.corrections: dict[str, Relabelled] = {}
        """The newest corrected reward of each attempt that has one."""
        for event in history:
            self.apply(event)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items.values())

    def apply(self, event: LedgerEvent) -> None:
        """Fold one event. What is said of an attempt that has no reward any more, or of one that
        was made again since, is left out.
        """
        match event:
            case Labelled() | Relabelled() if not self._is_current(event):
                pass
            case Relabelled():
                self.corrections[event.key] = event
            case Claimed() | Declined() | Labelled() if event.key in self._known:
                if event.key not in self._items:
                    self._items[event.key] = self._item(Selected(facts=self._known[event.key]))
                item = self._items[event.key]
                if isinstance(event, Claimed):
                    item.claim = event
                    return
                if item.claim is not None and item.claim.author == event.author:
                    item.claim = None
                if isinstance(event, Labelled):
                    item.labels[event.author] = event
                else:
                    item.declined.add(event.author)
            case _:
                pass

    def claim(self, author: str, now_s: float) -> Claimed | None:
        """A claim for the next attempt this person may review, or the one they hold already; None
        where nothing is left for them.

        Raises:
            UsageError: the author has no name.
        """
        if not author.strip():
            raise UsageError("wanted the name of the author, got nothing.", "add --author NAME")
        for item in self:
            held = item.claim
            if held is not None and held.author == author and now_s < held.until_s:
                return held
        for item in self:
            if item.offered(author, now_s):
                until_s = now_s + self.plan.lease_s
                key = item.facts.key
                return Claimed(key=key, author=author, wall_s=now_s, until_s=until_s)
        return None

    def label(self, key: str, label: str, *, author: str, reason: str, now_s: float) -> Labelled:
        """The label of an attempt that this person holds.

        Raises:
            UsageError: there is no such attempt or label, it contradicts the verdict, it lacks a
                reason, or the claim is missing, another's or over.
        """
        item = self._held(key, author, now_s)
        if label not in list(Label):
            raise UsageError(
                f"there is no label '{label}'{nearest(label, list(Label))}.",
                f"give one of {', '.join(Label)}",
            )
        reward = item.facts.reward
        if (label == Label.FALSE_REJECT and item.facts.accepted) or (
            label == Label.FALSE_ACCEPT and reward <= 0
        ):
            raise UsageError(
                f"attempt {item.facts.key} earned {reward:g}: it cannot be a {label}.",
                f"give {Label.RIGHT}, or what is wrong with it",
            )
        if not reason.strip():
            raise UsageError("a label wants a reason.", "add --reason TEXT")
        return Labelled(
            key=item.facts.key, label=label, author=author, reason=reason,
            reward=item.facts.reward, place=item.facts.place, wall_s=now_s,
        )  # fmt: skip

    def decline(self, key: str, *, author: str, now_s: float) -> Declined:
        """Gives an attempt back that this person holds.

        Raises:
            UsageError: as `label`.
        """
        item = self._held(key, author, now_s)
        return Declined(key=item.facts.key, author=author, wall_s=now_s)

    def relabel(self) -> list[Relabelled]:
        """A correction for each attempt whose reward people settled on is not the one it has."""
        found = []
        for item in self:
            settled, key = item.settled, item.facts.key
            if settled is None or settled.label == Label.UNCLEAR:
                continue
            old = self.corrections.get(key)
            wanted, now = deserved(settled), old.reward if old else item.facts.reward
            if wanted != now:
                reason = f"{settled.label}: {settled.reason}"
                place = item.facts.place
                found.append(Relabelled(key=key, reward=wanted, reason=reason, place=place))
        return found

    def check(self) -> None:
        """Invariants."""
        for item in self:
            assert not item.declined & set(item.labels), "what is declined is not offered again"
            assert item.claim is None or item.claim.author not in item.labels
            assert len(item.labels) <= max(3, item.needed)

    def find(self, key: str) -> Item:
        """An item by its key, or by the beginning of it.

        Raises:
            UsageError: no attempt, or more than one, is called so, or it is not in the queue.
        """
        matches = [known for known in self._items if known.startswith(key)] if key else []
        if len(matches) == 1:
            return self._items[matches[0]]
        if matches:
            raise UsageError(f"{len(matches)} attempts begin with '{key}'.", "give more digits.")
        if key in self._known:
            raise UsageError(f"attempt {key} is not to be reviewed.", "posttrain review ls RUN")
        raise UsageError(
            f"there is no attempt '{key}' in the queue{nearest(key, self._items)}.",
            "posttrain review ls RUN lists them.",
        )

    def _is_current(self, event: Labelled | Relabelled) -> bool:
        known = self._known.get(event.key)
        return known is not None and event.place in ("", known.place)

    def _item(self, chosen: Selected) -> Item:
        twice = seeds.unit("second review", chosen.facts.key) < self.plan.second
        return Item(chosen=chosen, needed=1 + twice)

    def _held(self, key: str, author: str, now_s: float) -> Item:
        item = self.find(key)
        claim, key = item.claim, item.facts.key
        again = f"posttrain review next RUN --author {author} claims one."
        if author in item.labels:
            raise UsageError(f"{author} has labelled attempt {key} already.", again)
        if claim is None or claim.author != author:
            other = claim is not None and now_s < claim.until_s
            why = "another person reviews it" if other else "it is not claimed"
            raise UsageError(f"attempt {key} is not {author}'s: {why}.", again)
        if now_s >= claim.until_s:
            ago = f"{now_s - claim.until_s:.0f} s"
            raise UsageError(f"{author}'s claim of attempt {key} ended {ago} ago.", again)
        return item
