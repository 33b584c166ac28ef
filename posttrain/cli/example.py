"""One task of a domain with its reference solution, made in a worker, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.task import Oracle, Task
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
        UsageError: unknown domain or level; DomainError: the domain failed.
    """
    async with ProcessWorkers() as workers:
        supply = Supply(workers)
        levels = len({key.level for key in await supply.keys([DomainSpec(name=name)])})
        (key,) = await supply.keys([DomainSpec(name=name, levels=(level,))])
        (task,) = await supply.drawn(key, root_seed=0, numbers=[draw])
        (oracle,) = await supply.oracles(key, [task])
    return Example(task=task, oracle=oracle, levels=levels)
