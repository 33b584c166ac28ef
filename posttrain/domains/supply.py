"""Tasks and reference solutions, made in killable workers; the only way to them from a run.

A thin driver over the worker functions of `catalogue`. The one thing that must stay true: a domain
that raises, hangs or dies is a DomainError that names it, and nothing of it ran in this process.
"""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core import codec
from posttrain.core.containment import Workers
from posttrain.core.errors import DomainError, UsageError, WorkerError
from posttrain.core.task import Json, Oracle, Task
from posttrain.domains import catalogue, mixture
from posttrain.domains.catalogue import DomainSpec
from posttrain.domains.mixture import Key, Split

_MODULE = "posttrain.domains.catalogue"


class Supply:
    """Calls domains through workers."""

    def __init__(
        self,
        workers: Workers,
        *,
        timeout_s: float = 30.0,
        heldout_share: float = mixture.HELDOUT_SHARE,
    ) -> None:
        """`timeout_s` is what one task may take; calls for several get as much for each."""
        self._workers = workers
        self._timeout_s = timeout_s
        self._heldout_share = heldout_share

    async def keys(self, specs: Sequence[DomainSpec]) -> tuple[Key, ...]:
        """The keys that the choices of a configuration stand for.

        Raises:
            UsageError: unknown names or levels; DomainError: a domain cannot be loaded.
        """
        found: list[Key] = []
        for spec in specs:
            for entry in catalogue.chosen(spec):
                name, levels, set_keys = entry.name, entry.levels, ()
                if levels is None:
                    told = await self._call("describe", entry.name, entry.reference)
                    if "refused" in told:
                        raise UsageError(*told["refused"])
                    name, levels = str(told["name"]), int(told["levels"])
                    set_keys = tuple(told.get("set_keys", ()))
                found += mixture.keys_of(
                    name,
                    levels=levels,
                    reference=entry.reference,
                    wanted=spec.levels,
                    weight=spec.weight,
                    set_keys=set_keys,
                )
        return tuple(found)

    async def drawn(self, key: Key, *, root_seed: int, numbers: Sequence[int]) -> tuple[Task, ...]:
        """The training tasks of draw numbers; of positions, where they are a finite set.

        Raises:
            DomainError: the domain raised, hung, died, or has nothing to train on.
        """
        arguments = (key.reference, key.level, root_seed, list(numbers), self._heldout_share)
        return _tasks(await self._call("drawn", key.domain, *arguments, size=len(numbers)))

    async def seeded(self, key: Key, seed: int) -> Task:
        """The task of a seed, held out or not.

        Raises:
            DomainError: the domain raised, hung or died.
        """
        told = await self._call("tasks", key.domain, key.reference, [[seed, key.level]])
        return _tasks(told)[0]

    async def peak_bytes(self, key: Key) -> int:
        """Most memory that a process which made tasks for this ever took."""
        return int(await self._call("peak_bytes", key.domain))

    async def pool(
        self, key: Key, *, root_seed: int, count: int, split: Split = Split.HELDOUT
    ) -> tuple[Task, ...]:
        """`count` distinct tasks of a split, in a fixed order; all there are where it has fewer.

        Raises:
            DomainError: the domain raised, hung or died.
        """
        share = self._heldout_share
        arguments = (key.reference, key.level, root_seed, count, split.value, share)
        return _tasks(await self._call("pool", key.domain, *arguments, size=count))

    async def oracles(self, key: Key, tasks: Sequence[Task]) -> tuple[Oracle, ...]:
        """The reference solutions of tasks of a key's domain.

        Raises:
            DomainError: the domain raised, hung or died.
        """
        arguments = (key.reference, [codec.to_json(task) for task in tasks])
        told = await self._call("oracles", key.domain, *arguments, size=len(tasks))
        return tuple(codec.from_json(Oracle, one) for one in told)

    async def problems(self, key: Key, seeds: Sequence[int]) -> tuple[str, ...]:
        """What breaks the contract of domains, for these seeds at the key's level.

        Raises:
            DomainError: the domain raised, hung or died.
        """
        pairs = [[seed, key.level] for seed in seeds]
        told = await self._call("contract", key.domain, key.reference, pairs, size=len(pairs))
        return tuple(str(one) for one in told)

    async def _call(self, function: str, domain: str, *arguments: Json, size: int = 1) -> Json:
        limit_s, called = self._timeout_s * max(1, size), f"{_MODULE}:{function}"
        try:
            return await self._workers.call(called, *arguments, timeout_s=limit_s)
        except WorkerError as error:
            told = error.message.removeprefix(f"{called} ").removeprefix("raised DomainError: ")
            message, _, next_step = told.partition(" Next: ")
            if domain not in message:
                message = f"domain {domain!r}: {message}"
            raise DomainError(message, next_step or error.next_step) from error


def _tasks(told: Json) -> tuple[Task, ...]:
    return tuple(codec.from_json(Task, one) for one in told)
