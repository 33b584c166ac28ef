"""What happened, as plain records: the ledger's events (durable), the journal's (the rest).

A ledger event is small, names attempts by their hexadecimal key, and is written before its effect
is relied on. The journal carries free-form records (`Note`). The one thing that must stay true:
`decode(encode(event)) == event` for every ledger event, for ever; fields are added, never renamed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from posttrain.core.errors import LedgerError
from posttrain.core.task import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEvent:
    """Base of every durable event."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(LedgerEvent):
    """A run began, or went on, under this configuration."""

    kind: ClassVar[str] = "started"
    run: str
    config_sha256: str
    resumed: bool = False
    config: Mapping[str, Json] = field(default_factory=dict)
    """Every setting, as plain JSON values; {}: of a ledger that does not hold them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn(LedgerEvent):
    """One sampling decision: `draw` fixes domain, level and task seed."""

    kind: ClassVar[str] = "drawn"
    draw: int
    domain: str
    level: int
    seed: int
    size: int
    """Attempts in the group."""
    phase: str
    """`sft` or `rl`."""
    set_key: str = ""
    """Hash of the tasks it was drawn from, where they are a finite set; '': they are endless."""
    place: int = 0
    """How many draws fell on the same tasks before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered(LedgerEvent):
    """An attempt exists from now on and must end trained or dropped."""

    kind: ClassVar[str] = "entered"
    key: str
    draw: int
    member: int
    tries: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(LedgerEvent):
    """An attempt ended and was judged; its trajectory is readable at `place`."""

    kind: ClassVar[str] = "finished"
    key: str
    outcome: str
    reward: float | None
    stop: str
    num_tokens: int
    oldest_version: int
    """Oldest weight version among its sampled tokens; -1 if none was sampled."""
    place: str
    """Where the record lies in the journal (`segment:offset:length`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reverified(LedgerEvent):
    """A finished attempt was judged again, later; its newest judgement is the one that counts."""

    kind: ClassVar[str] = "reverified"
    key: str
    outcome: str
    reward: float | None
    verifier: str
    """Kinds and versions of what judged."""
    place: str
    """Where the verdict lies in the journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained(LedgerEvent):
    """A step consumed these attempts; the weights it made are `version`."""

    kind: ClassVar[str] = "trained"
    step: int
    version: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(LedgerEvent):
    """Attempts that will never be trained, and why."""

    kind: ClassVar[str] = "dropped"
    keys: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(LedgerEvent):
    """New weights were handed on."""

    kind: ClassVar[str] = "published"
    version: int
    parent: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(LedgerEvent):
    """A complete checkpoint of `step` exists; its cut is this event's own place in the ledger."""

    kind: ClassVar[str] = "saved"
    step: int
    version: int
    next_draw: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound(LedgerEvent):
    """A resume went back to the checkpoint of `step`: what was trained later is `finished` again,
    and versions above `version` are no longer in the lineage.
    """

    kind: ClassVar[str] = "rewound"
    step: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(LedgerEvent):
    """The suite was run at a point of the run (`base`, `sft`, `rl`, or within RL `rl@STEP`), after
    `step`.
    """

    kind: ClassVar[str] = "evaluated"
    point: str
    step: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled(LedgerEvent):
    """A person's judgement of an attempt."""

    kind: ClassVar[str] = "labelled"
    key: str
    label: str
    author: str
    reason: str = ""
    reward: float | None = None
    """The reward that was judged."""
    place: str = ""
    """Where the record that was judged lies in the journal; an attempt may be made again."""
    wall_s: float = 0.0
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed(LedgerEvent):
    """A person reviews an attempt; nobody else is given it until `until_s`."""

    kind: ClassVar[str] = "claimed"
    key: str
    author: str
    wall_s: float
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined(LedgerEvent):
    """A person gave a claimed attempt back and is not offered it again."""

    kind: ClassVar[str] = "declined"
    key: str
    author: str
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Relabelled(LedgerEvent):
    """People corrected an attempt's reward; the newest correction counts."""

    kind: ClassVar[str] = "relabelled"
    key: str
    reward: float | None
    """None: the task is broken, the attempt gives no signal."""
    reason: str
    place: str = ""
    """As in `Labelled`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controlled(LedgerEvent):
    """A control was used on the run (pause, quarantine, weight, …)."""

    kind: ClassVar[str] = "controlled"
    action: str
    arguments: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(LedgerEvent):
    """The run reached an end; `reason` is `done`, `interrupted` or `failed: …`."""

    kind: ClassVar[str] = "ended"
    reason: str


LEDGER_EVENTS: Mapping[str, type[LedgerEvent]] = {
    event.kind: event
    for event in (
        Started, Drawn, Entered, Finished, Reverified, Trained, Dropped, Published, Saved, Rewound,
        Evaluated, Labelled, Claimed, Declined, Relabelled, Controlled, Ended,
    )
}  # fmt: skip


def encode(event: LedgerEvent) -> str:
    """One line of JSON without the newline.

    >>> encode(Dropped(keys=("ab",), reason="stale"))
    '{"kind": "dropped", "keys": ["ab"], "reason": "stale"}'
    """
    return json.dumps({"kind": event.kind, **dataclasses.asdict(event)}, allow_nan=False)


def decode(line: str) -> LedgerEvent:
    """The event of one line.

    Raises:
        LedgerError: the line is no known event.
    """
    try:
        fields = json.loads(line)
        event = LEDGER_EVENTS[fields.pop("kind")]
        return event(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"not a ledger event: {line[:120]!r} ({error})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One journal record: what the ledger does not need but people and reports do."""

    kind: str
    """`step`, `trajectory`, `heartbeat`, `eval`, `stats`, `warning`, …"""
    key: str = ""
    """Attempt key in hexadecimal, where the record belongs to one."""
    data: Mapping[str, Json] = field(default_factory=dict)
    wall_s: float = 0.0
    """Seconds since the epoch; filled in by the journal when 0."""
