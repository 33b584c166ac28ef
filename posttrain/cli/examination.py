"""The examination of several domains for `domains check`, side by side.

It judges nothing (`evals.admission` does) and builds nothing (`loop.wiring` does). The one thing
that must stay true: every domain asked about gets its report, whatever is wrong with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from posttrain.core.errors import PosttrainError
from posttrain.domains.catalogue import DomainSpec, Entry
from posttrain.evals.admission import Admission
from posttrain.loop.wiring import open_examiner

SIDE_BY_SIDE = 2


async def examine(
    entries: Sequence[Entry],
    *,
    per_level: int,
    begins: Callable[[str], None],
    ends: Callable[[str], None],
) -> AsyncIterator[tuple[str, Admission]]:
    """Name of each domain, as it was asked for, and the report on it, as they are done; `begins`
    and `ends` are told what is under examination.
    """
    async with open_examiner(processes=SIDE_BY_SIDE) as (supply, examiner):
        room = asyncio.Semaphore(SIDE_BY_SIDE)

        async def one(entry: Entry) -> tuple[str, Admission]:
            async with room:
                begins(entry.name)
                try:
                    keys = await supply.keys([DomainSpec(name=entry.name)])
                    return entry.name, await examiner.examine(keys, per_level=per_level)
                except PosttrainError as error:
                    refused = Admission(domain=entry.name, tasks=0, distinct=0, error=str(error))
                    return entry.name, refused
                finally:
                    ends(entry.name)

        tasks = [asyncio.create_task(one(entry)) for entry in entries]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
