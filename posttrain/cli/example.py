"""One task of a domain with its reference solution, made in a worker, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.errors import UsageError
from posttrain.core.task import Oracle, Task
from posttrain.domains import catalogue
from posttrain.domains.catalogue import DomainSpec
from posttrain.domains.supply import Supply
from posttrain.sandbox.worker import ProcessWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One task with its reference solution."""

    task: Task
    oracle: Oracle
    levels: int


async def make(name: str, *, level: int, draw: int) -> Example:
    """The training task of a draw number at a level.

    Raises:
        UsageError: unknown domain or level, or a pattern of several; DomainError: it failed.
    """
    named = [entry.name for entry in catalogue.matching(name)]
    if len(named) > 1:
        raise UsageError(
            f"domains show wants one domain, and {name!r} names {len(named)}.",
            f"posttrain domains show {named[0]}; posttrain domains ls '{name}' lists all of them.",
        )
    async with ProcessWorkers() as workers:
        supply = Supply(workers)
        levels = len({key.level for key in await supply.keys([DomainSpec(name=name)])})
        (key,) = await supply.keys([DomainSpec(name=name, levels=(level,))])
        (task,) = await supply.drawn(key, root_seed=0, numbers=[draw])
        (oracle,) = await supply.oracles(key, [task])
    return Example(task=task, oracle=oracle, levels=levels)
