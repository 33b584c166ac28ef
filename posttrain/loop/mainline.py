"""Carrying out what concerns the weights: train, publish, save, evaluate; one at a time.

It chooses nothing. The one thing that must stay true: the ledger says what a step trained before
the weights it made are handed on, and a checkpoint is named there only once it is complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core import events
from posttrain.core.errors import NonFiniteError
from posttrain.core.ports import Example, StepReport
from posttrain.core.trajectory import Group
from posttrain.loop import moves
from posttrain.loop.book import Book
from posttrain.loop.moves import Evaluate, Event, Phase, Publish, Save, Train
from posttrain.loop.parts import Parts
from posttrain.loop.telemetry import Telemetry
from posttrain.loop.watch import Watch


class Mainline:
    """The weights' side of a run."""

    def __init__(self, parts: Parts, book: Book, telemetry: Telemetry, watch: Watch) -> None:
        self._parts = parts
        self._book = book
        self._telemetry = telemetry
        self._watch = watch

    async def train(self, instruction: Train, groups: Sequence[Group]) -> Event:
        """Make a step and account for it.

        Raises:
            NonFiniteError: a loss or gradient was not finite; no weight changed, and the attempts
                stay pending. It says where a resume goes on.
        """
        current = self._book.past.lineage.current
        try:
            with self._parts.handing_over(instruction.version, current):
                report = await self._step(instruction, groups)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error.message} {self._retreat()}", error.next_step) from error
        changed = report.loss is not None
        version = instruction.version if changed else current
        keys = tuple(key for batch in instruction.batches for key in batch.keys)
        self._book.write(events.Trained(step=instruction.step, version=version, keys=keys))
        self._book.note("step", self._telemetry.step(instruction, groups, report))
        if not changed:
            self._book.sync()
        return moves.StepDone(changed=changed)

    async def publish(self, instruction: Publish) -> Event:
        """Hand the new weights on."""
        self._book.published(instruction)
        self._book.sync()
        for sink in self._parts.sinks:
            await sink.publish(version=instruction.version, parent=instruction.parent)
        return moves.Published()

    async def save(self, instruction: Save) -> Event:
        """Write a checkpoint, name it in the ledger, and let older ones go.

        Raises:
            CheckpointError: it could not be written; earlier ones are untouched.
        """
        path = self._parts.checkpoints.place(instruction.step)
        extra = {
            "step": instruction.step,
            "version": instruction.version,
            "next_draw": instruction.next_draw,
            "rl_active_s": self._telemetry.rl_active_s,
            "watch": self._watch.save(),
        }
        await self._parts.trainer.save(path, extra=extra)
        self._book.saved(instruction, path.relative_to(self._parts.directory).as_posix())
        self._book.sync()
        self._parts.checkpoints.retire(instruction.step)
        self._book.note("saved", {"step": instruction.step, "message": f"saved {path.name}"})
        self._telemetry.mark()
        return moves.Saved()

    async def evaluate(self, instruction: Evaluate) -> Event:
        """Run the suite; the result is in the journal before the ledger calls it done."""
        self._book.tell(f"evaluating ({instruction.point})")
        past = self._book.past
        here = events.Evaluated(
            point=instruction.point, step=past.account.step, version=past.lineage.current
        )
        self._watch.compare(await self._parts.evaluate(here))
        self._book.write(here)
        self._book.sync()
        self._telemetry.mark()
        return moves.Evaluated(point=instruction.point)

    def _retreat(self) -> str:
        """Where a resume goes on once a step gave what is not finite: not from the weights that
        gave it, where others are left.
        """
        past, step = self._book.past, self._book.past.account.step
        earlier = [one for one in past.saved if one.step < step]
        left = not earlier or (self._parts.directory / earlier[-1].path).is_dir()
        if left and past.saved[-1:] != earlier[-1:]:
            self._book.distrusted(step)
        if not past.saved:
            return "A resume begins with the starting weights."
        return f"A resume goes on from {past.saved[-1].path}."

    async def _step(self, instruction: Train, groups: Sequence[Group]) -> StepReport:
        if instruction.phase is Phase.RL:
            return await self._parts.trainer.rl_step(
                groups, version=self._book.past.lineage.current
            )
        rows = [row for group in groups for member in group.members for row in member.rows]
        examples = [Example(row=row) for row in rows if row.num_trained]
        return await self._parts.trainer.sft_step(examples)
