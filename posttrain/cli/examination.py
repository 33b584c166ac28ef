"""The examination of several domains, side by side, with their reports kept for the next time.

It judges nothing (`evals.admission` does) and builds nothing (`loop.examining` does). The one thing
that must stay true: every domain asked about gets its report, whatever is wrong with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

from posttrain.cli import runs
from posttrain.core.errors import PosttrainError
from posttrain.domains import catalogue
from posttrain.domains.catalogue import DomainSpec
from posttrain.evals import registry
from posttrain.evals.admission import Admission
from posttrain.evals.attackers import Fixture
from posttrain.loop.examining import open_examiner
from posttrain.loop.settings import RunConfig
from posttrain.loop.wiring import sandboxed_domains


class Admissions:
    """A folder of reports on domains, by the fingerprint of what was examined."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, fingerprint: str) -> Admission | None:
        """The stored report; None where there is none that reads back whole."""
        return registry.read(self._folder / f"{fingerprint}.json", Admission)

    def put(self, fingerprint: str, report: Admission) -> Path:
        """Store it; returns the file's path.

        Raises:
            OSError: the folder cannot be written.
        """
        return registry.write(self._folder / f"{fingerprint}.json", report)


SIDE_BY_SIDE = 2


class Watch(Protocol):
    """Is told what is under examination."""

    def begins(self, name: str) -> None:
        """The examination of a domain begins."""
        ...

    def ends(self, name: str) -> None:
        """It is over."""
        ...


def each(specs: Sequence[DomainSpec]) -> list[DomainSpec]:
    """The choices of a configuration, patterns as one for each domain of theirs."""
    return [
        spec if spec.source else spec.model_copy(update={"name": entry.name})
        for spec in specs
        for entry in catalogue.chosen(spec)
    ]


async def examine(
    specs: Sequence[DomainSpec],
    watch: Watch,
    config: RunConfig,
    *,
    per_level: int,
    known: bool = False,
    fixtures: Sequence[Fixture] = (),
) -> AsyncIterator[tuple[str, Admission]]:
    """Name of each choice, as it was made, and the report on it, as they are done; judge, sandboxes
    and limits are those of the configuration. `known`: before a run, for which a kept report on the
    same tasks and the same judging code is good enough.

    Raises:
        UsageError, DomainError, IsolationError: before a run, what would end it at its beginning.
    """
    kept = Admissions(runs.root() / "admissions")
    async with open_examiner(config, processes=SIDE_BY_SIDE) as (supply, examiner, source):
        room = asyncio.Semaphore(SIDE_BY_SIDE)
        if known:
            keys = [key for spec in specs for key in await supply.keys([spec])]
            await sandboxed_domains(keys, supply, source)

        async def report(spec: DomainSpec) -> Admission:
            keys = await supply.keys([spec])
            fingerprint = await examiner.fingerprint(keys)
            if known and (found := kept.get(fingerprint)) is not None:
                return found
            made = await examiner.examine(keys, per_level=per_level, fixtures=fixtures)
            if not made.failed:
                with contextlib.suppress(OSError):  # it is made again next time
                    kept.put(fingerprint, made)
            return made

        async def one(spec: DomainSpec) -> tuple[str, Admission]:
            async with room:
                watch.begins(spec.name)
                try:
                    return spec.name, await report(spec)
                except PosttrainError as error:
                    refused = Admission(domain=spec.name, tasks=0, distinct=0, error=str(error))
                    return spec.name, refused
                finally:
                    watch.ends(spec.name)

        tasks = [asyncio.create_task(one(spec)) for spec in specs]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
