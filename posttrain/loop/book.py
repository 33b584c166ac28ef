"""The run's bookkeeping: every durable event and every trajectory goes through here.

An event is folded into the past first (so one that breaks the account never reaches the disk) and
appended then. It decides nothing. The one thing that must stay true: what `past` says is what the
ledger on the disk says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.core import codec, events
from posttrain.core.events import Note
from posttrain.core.task import Json
from posttrain.core.trajectory import AttemptKey, Trajectory
from posttrain.core.verdict import Outcome, Verdict
from posttrain.domains import mixture
from posttrain.loop.moves import Draw, Publish, Save
from posttrain.loop.parts import Records
from posttrain.loop.past import DISTRUST, HOLD, QUARANTINE, Past
from posttrain.schedule.account import Status


class Book:
    """Ledger, journal and recorder of one run, over its past."""

    def __init__(self, records: Records, past: Past) -> None:
        self._records = records
        self.past = past

    def write(self, event: events.LedgerEvent) -> None:
        """Account for an event.

        Raises:
            LedgerError: it cannot be written; the run must stop.
            IllegalTransitionError: it contradicts what came before.
        """
        self.past.apply(event)
        self._records.ledger.append(event)

    def sync(self) -> None:
        """Everything written is on the disk when this returns (the journal as far as it can)."""
        self._records.journal.sync()
        self._records.ledger.sync()

    def note(self, kind: str, data: Mapping[str, Json], *, key: str = "") -> str:
        """A journal record that people are told too; returns its place."""
        place = self._records.journal.write(Note(kind=kind, key=key, data=data))
        self._records.recorder.record(kind, data)
        return place

    def tell(self, message: str) -> None:
        """Let whoever watches know; nothing is written down."""
        self._records.recorder.record("heartbeat", {"message": message})

    def announce(self, message: str, **data: Json) -> None:
        """As `tell`, of something that whoever watches wants to know at once."""
        self._records.recorder.record("notice", {"message": message, **data})

    def warn(self, message: str) -> None:
        """Say something aloud that does not stop the run."""
        self.note("warning", {"message": message})

    # --- attempts -----------------------------------------------------------------------------

    def drawn(self, draw: Draw, decision: mixture.Draw) -> None:
        """A sampling decision, and the attempts it brings into being."""
        key = decision.key
        sets = self.past.places.get((key.domain, key.level), {})
        place = sets.get(key.set_key, 0)
        if sets and not place:
            self.warn(
                f"The tasks of {key.domain}, level {key.level}, are not those the run "
                "drew from before; it begins with the new ones at the first."
            )
        self.write(
            events.Drawn(
                draw=draw.draw,
                domain=key.domain,
                level=key.level,
                seed=decision.seed,
                size=draw.size,
                phase=str(draw.phase),
                set_key=key.set_key,
                place=place,
            )
        )
        for attempt in self.past.statuses(draw.draw):
            self.entered(attempt)

    def entered(self, key: AttemptKey) -> int:
        """The attempt is about to be made, for the first time or again; returns which try."""
        known = self.past.account.attempt(key.hex)
        tries = 1 if known is None else known.tries + 1
        self.write(events.Entered(key=key.hex, draw=key.draw, member=key.member, tries=tries))
        return tries

    def finished(self, trajectory: Trajectory) -> None:
        """The attempt came to its outcome: first its trajectory, then the event with its place."""
        key = trajectory.key.hex
        data = codec.to_json(trajectory)
        place = self._records.journal.write(Note(kind="trajectory", key=key, data=data))
        outcome = trajectory.outcome or Outcome.CANCELLED
        self.write(
            events.Finished(
                key=key,
                outcome=str(outcome),
                reward=trajectory.reward,
                stop=str(trajectory.stop),
                num_tokens=trajectory.num_sampled_tokens,
                oldest_version=min(trajectory.versions(), default=-1),
                place=place,
            )
        )

    def dropped(self, keys: Sequence[str], reason: str) -> None:
        """These attempts will never be trained; those that are settled already are left alone."""
        pending = (Status.ENTERED, Status.FINISHED)
        known = (self.past.account.attempt(key) for key in keys)
        open_keys = tuple(one.key for one in known if one is not None and one.status in pending)
        if open_keys:
            self.write(events.Dropped(keys=open_keys, reason=reason))

    def recall(self, key: AttemptKey) -> Trajectory | None:
        """A finished attempt's trajectory, or None where the journal does not have it whole."""
        known = self.past.account.attempt(key.hex)
        if known is None or known.finished is None:
            return None
        note = self._records.journal.read(known.finished.place)
        if note is None or note.key != key.hex:
            return None
        try:
            trajectory = codec.from_json(Trajectory, note.data)
            if (later := self.past.reverified.get(key.hex)) is None:
                return trajectory
            judged = self._records.journal.read(later.place)
            if judged is None or judged.key != key.hex:
                return None
            verdict = codec.from_json(Verdict, judged.data)
            return trajectory.judged(verdict, Outcome(later.outcome))
        except (TypeError, ValueError):
            return None

    def reverified(self, key: AttemptKey, verdict: Verdict) -> events.Reverified:
        """A finished attempt was judged again: first the verdict, then the event with its place."""
        outcome = Outcome.VERIFIER_FAILED if verdict.reward is None else Outcome.SCORED
        note = Note(kind="verdict", key=key.hex, data=codec.to_json(verdict))
        event = events.Reverified(
            key=key.hex,
            outcome=str(outcome),
            reward=verdict.reward,
            verifier=" ".join(sorted({part.verifier_version for part in verdict.components})),
            place=self._records.journal.write(note),
        )
        self.write(event)
        return event

    # --- the main line ------------------------------------------------------------------------

    def published(self, instruction: Publish) -> None:
        """New weights are about to be handed on. The lineage is the loop's, which moved already."""
        self._records.ledger.append(
            events.Published(
                version=instruction.version, parent=instruction.parent, step=instruction.step
            )
        )

    def saved(self, instruction: Save, path: str) -> None:
        """A complete checkpoint exists."""
        self.write(
            events.Saved(
                step=instruction.step,
                version=instruction.version,
                next_draw=instruction.next_draw,
                path=path,
            )
        )

    def distrusted(self, step: int) -> None:
        """No resume goes on from this step's checkpoint: its weights gave what is not finite."""
        self.write(events.Controlled(action=DISTRUST, arguments={"step": step}))

    def quarantined(self, domain: str, evidence: str) -> None:
        """A domain is out of the mixture from now on."""
        arguments = {"domain": domain, "evidence": evidence}
        self.write(events.Controlled(action=QUARANTINE, arguments=arguments))
        self.note("quarantine", arguments)
        self.warn(f"Domain {domain} is quarantined: {evidence}")

    def held(self, domain: str, evidence: str) -> None:
        """A domain's groups are held out of training until people release it."""
        arguments = {"domain": domain, "evidence": evidence}
        self.write(events.Controlled(action=HOLD, arguments=arguments))
        self.note("hold", arguments)
        self.warn(f"Domain {domain} is held out of training until it is released: {evidence}")
