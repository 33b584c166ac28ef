"""Drives a run: feeds events to `loop.state` and carries its instructions out.

It decides nothing that `state` decides. Whatever goes wrong anywhere below ends here, once, as a
`Failed` event with one paragraph, or, where it is a mistake of ours, as the exception itself. The
one thing that must stay true: when `run` returns or raises, nothing of the run is still working,
and everything that was accounted for is in the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.core import events
from posttrain.core.errors import (
    IllegalTransitionError,
    LedgerError,
    NonFiniteError,
    PosttrainError,
)
from posttrain.core.task import Json
from posttrain.core.trajectory import Trajectory
from posttrain.loop.attempts import Attempts
from posttrain.loop.book import Book
from posttrain.loop.mainline import Mainline
from posttrain.loop.moves import (
    Begin,
    BudgetSpent,
    Draw,
    DropGroup,
    DropMembers,
    Evaluate,
    Event,
    Failed,
    Hold,
    Instruction,
    Interrupted,
    LoopPlan,
    Phase,
    Publish,
    Quarantine,
    Reopen,
    Save,
    StepDone,
    Stop,
    Train,
    Warn,
)
from posttrain.loop.parts import Parts
from posttrain.loop.past import Past
from posttrain.loop.state import Loop, LoopStats, Stage
from posttrain.loop.telemetry import Telemetry
from posttrain.loop.watch import Watch
from posttrain.schedule.account import AccountStats

LEAVING = {Stage.EVALUATING: "leaving the evaluation", Stage.SAVING: "saving"}
"""What the first interrupt does where no step is being made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended."""

    reason: str
    """`done`, `interrupted` or `failed: …`."""
    step: int
    saved_step: int
    """Where a resume goes on; 0: nothing was saved."""
    account: AccountStats

    @property
    def failed(self) -> bool:
        """Whether the run failed (exit code 1)."""
        return self.reason.startswith("failed")


class Driver:
    """One run from its past to an end. Used once."""

    def __init__(
        self, parts: Parts, plan: LoopPlan, past: Past, *, saved: Mapping[str, Json] | None = None
    ) -> None:
        """`saved`: the extra of the checkpoint the run goes on from."""
        self._parts = parts
        self._book = Book(parts.records, past)
        self._loop = Loop(plan, position=past.position(), lineage=past.lineage)
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        extra = saved or {}
        spent_s = float(extra.get("rl_active_s", 0.0))
        self._telemetry = Telemetry(parts.records.clock, parts.busy_s, rl_active_s=spent_s)
        watch = Watch(self._book, extra.get("watch"), hold=parts.hold_alarms)
        self._attempts = Attempts(
            parts,
            self._book,
            self._events.put_nowait,
            on_finished=self._attempt_ended,
            watch=watch,
        )
        self._mainline = Mainline(parts, self._book, self._telemetry, watch)
        self._work: set[asyncio.Task[None]] = set()
        self._phase: Phase | None = None
        self._interrupts = 0

    def interrupt(self) -> None:
        """Ask the run to stop: the first time after the step in progress and a checkpoint, the
        second time at once.
        """
        self._interrupts += 1
        stage = self._loop.stats().stage
        if self._interrupts == 1 and stage is not Stage.STOPPED:
            now = LEAVING.get(stage, "finishing the step, then saving")
            self._book.announce(f"{now}; once more stops at once")
        self._events.put_nowait(Interrupted())

    def check(self) -> None:
        """Invariants of everything that decides."""
        self._loop.check()
        self._book.past.account.check()

    def stats(self) -> LoopStats:
        """Where the loop stands."""
        return self._loop.stats()

    async def run(self) -> Ending:
        """Run to an end.

        Raises:
            Exception: only a mistake of ours; the ledger then says that the run failed.
        """
        reason = ""
        self._events.put_nowait(Begin())
        if self._budget_is_spent():
            self._events.put_nowait(BudgetSpent())
        try:
            while not reason:
                event = await self._events.get()
                reason = "interrupted" if self._interrupts > 1 else self._handle(event)
        except BaseException as error:
            reason = f"failed: {type(error).__name__}: {error}"
            raise
        finally:
            await asyncio.shield(self._close(reason or "failed: the run was cancelled"))
        past = self._book.past
        saved_step = past.saved[-1].step if past.saved else 0
        return Ending(
            reason=reason,
            step=past.account.step,
            saved_step=saved_step,
            account=past.account.stats(),
        )

    # --- events and instructions --------------------------------------------------------------

    def _handle(self, event: Event | Exception) -> str:
        """Take in one event; the reason to stop, or ''."""
        if isinstance(event, Exception):
            event = _failed(event)
        if isinstance(event, StepDone) and self._budget_is_spent():
            self._loop.handle(BudgetSpent())  # it asks for nothing while a step is in progress
        instructions = self._loop.handle(event)
        self._note_phase()
        for instruction in instructions:
            if isinstance(instruction, Stop):
                return instruction.reason
            try:
                self._carry_out(instruction)
            except PosttrainError as error:
                self._events.put_nowait(_failed(error))
                return ""
        return ""

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Draw():
                self._attempts.draw(instruction)
            case Reopen():
                self._attempts.reopen(instruction.draw)
            case DropMembers():
                self._attempts.drop_members(instruction)
            case DropGroup():
                self._attempts.drop_group(instruction)
            case Train():
                groups = [self._attempts.take(batch) for batch in instruction.batches]
                self._start(self._mainline.train(instruction, groups))
            case Publish():
                self._start(self._mainline.publish(instruction))
            case Save():
                self._start(self._mainline.save(instruction))
            case Evaluate():
                self._start(self._mainline.evaluate(instruction))
            case Quarantine():
                self._book.quarantined(instruction.domain, instruction.evidence)
            case Hold():
                self._book.held(instruction.domain, instruction.evidence)
            case Warn():
                self._book.warn(instruction.message)
            case _:
                raise IllegalTransitionError(f"the driver knows no instruction {instruction!r}.")

    def _start(self, work: Coroutine[Any, Any, Event]) -> None:
        """Let a piece of the main line run; what comes of it, or goes wrong, is an event."""

        async def tell() -> None:
            try:
                self._events.put_nowait(await work)
            except Exception as error:
                self._events.put_nowait(error)

        task = asyncio.create_task(tell())
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    # --- bookkeeping --------------------------------------------------------------------------

    def _attempt_ended(self, trajectory: Trajectory) -> None:
        self._telemetry.attempt(trajectory)
        self._book.tell(f"{self._telemetry.attempts} attempts since the last step")

    def _budget_is_spent(self) -> bool:
        budget_s = self._parts.rl_seconds
        return budget_s is not None and self._telemetry.rl_active_s >= budget_s

    def _note_phase(self) -> None:
        stats = self._loop.stats()
        if stats.phase is not None and stats.phase is not self._phase:
            self._phase = stats.phase
            spent_s = self._telemetry.rl_active_s if stats.phase is Phase.RL else 0.0
            note = {"phase": str(stats.phase), "step": stats.step, "spent_s": spent_s}
            self._book.note("phase", note)

    async def _close(self, reason: str) -> None:
        """End all work and say in the ledger how the run ended, as far as it can be written."""
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await self._attempts.close()
        with contextlib.suppress(LedgerError):  # the reason may be that it cannot be written
            self._book.write(events.Ended(reason=reason))
            self._book.sync()
        self._book.note("ended", {"message": reason})


def _failed(error: Exception) -> Failed:
    """The event of an error the run cannot go on with. Weights that gave a loss which is not finite
    are not worth saving: a resume from them would fail in the same way.

    Raises:
        Exception: the error itself, where it is a mistake of ours and not of the world.
    """
    if isinstance(error, IllegalTransitionError) or not isinstance(
        error, (PosttrainError, OSError)
    ):
        raise error
    return Failed(message=str(error), savable=not isinstance(error, (LedgerError, NonFiniteError)))
