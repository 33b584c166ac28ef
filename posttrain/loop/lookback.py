"""Opens a run that nobody trains, to judge its attempts again or to take it back.

It decides nothing (`reverify`, `rollback` do). The one thing that must stay true: the ledger's lock
is held all the while, so a run under way is left alone, and refused with who has it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from posttrain.core.clock import RealClock
from posttrain.core.containment import Sealed
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.events import Relabelled
from posttrain.core.ports import Recorder
from posttrain.core.task import Environment
from posttrain.domains.catalogue import DomainSpec
from posttrain.domains.mixture import Key
from posttrain.domains.supply import Supply
from posttrain.loop.book import Book
from posttrain.loop.drawing import SupplyTasks
from posttrain.loop.judging import open_judge
from posttrain.loop.parts import Records
from posttrain.loop.past import Past, fold
from posttrain.loop.reverify import Reverifier
from posttrain.loop.settings import RunConfig
from posttrain.loop.wiring import open_sandboxes
from posttrain.observe.index import REVIEWS
from posttrain.observe.journal import FileJournal
from posttrain.observe.kept import archive_of
from posttrain.observe.ledger import FileLedger, read_events
from posttrain.observe.workspaces import restored
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.verify.kinds import Tools, hidden_seeds
from posttrain.verify.recorded import recorded_seeds
from posttrain.verify.stack import Stack


@contextmanager
def open_ledger(directory: Path) -> Iterator[tuple[FileLedger, Past]]:
    """The ledger of a run, for writing, and what it amounts to.

    Raises:
        UsageError: the run never began.
        LedgerError: it cannot be opened, or the run is under way.
    """
    with FileLedger(directory / "ledger.jsonl") as ledger:
        past = fold(ledger.events())
        if not past.starts:
            raise UsageError(f"{directory} holds no run that began.", "posttrain train")
        yield ledger, past


@asynccontextmanager
async def open_reverifier(
    config: RunConfig, directory: Path, recorder: Recorder, *, fresh: bool = False
) -> AsyncIterator[tuple[Reverifier, Past]]:
    """What judges a run's attempts again, with today's domains and checks; needs no model. Hidden
    inputs are those of the recorded verdicts, or `fresh` ones.

    Raises:
        UsageError, LedgerError: as `open_ledger`.
        IsolationError: there are attempts in sandboxes, and this machine can make none.
    """
    clock = RealClock()
    async with AsyncExitStack() as stack:
        ledger, past = stack.enter_context(open_ledger(directory))
        journal = FileJournal(directory / "journal")
        stack.callback(journal.close)
        workers = await stack.enter_async_context(ProcessWorkers(processes=config.sandbox.workers))
        _, sandboxes = await open_sandboxes(stack, clock, config.sandbox.driver, journal)
        chat = await open_judge(stack, config.judge, clock)
        archive = archive_of(directory)

        @asynccontextmanager
        async def restore(sha256: str, environment: Environment) -> AsyncIterator[Sealed]:
            async with restored(sandboxes, archive(sha256), environment) as sealed:
                yield sealed

        supply = Supply(workers, timeout_s=config.domains.task_timeout_s,
                        heldout_share=config.domains.heldout_share)  # fmt: skip
        records = Records(ledger=ledger, journal=journal, recorder=recorder, clock=clock)
        yield (
            Reverifier(
                Book(records, past),
                verifier=Stack(
                    Tools(
                        clock=clock,
                        workers=workers,
                        sandboxes=sandboxes,
                        chat=chat,
                        seeds=hidden_seeds() if fresh else recorded_seeds(hidden_seeds()),
                    )
                ),
                tasks=SupplyTasks(
                    supply, await _keys(supply, config.domains.train), root_seed=config.run.seed
                ),
                restore=restore,
                corrections=_corrections(directory / REVIEWS),
            ),
            past,
        )


def _corrections(reviews: Path) -> dict[str, Relabelled]:
    """Attempt key → the newest correction by people."""
    found = read_events(reviews) if reviews.exists() else ()
    return {event.key: event for event in found if isinstance(event, Relabelled)}


async def _keys(supply: Supply, specs: Sequence[DomainSpec]) -> list[Key]:
    """Those of the domains that are there today; the attempts of others keep their checks."""
    found: list[Key] = []
    for spec in specs:
        try:
            found += await supply.keys([spec])
        except PosttrainError:
            continue
    return found
