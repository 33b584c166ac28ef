"""Epochs over a finite set of tasks: a seeded shuffle an epoch, each task once in it.

A position is a plain number that the ledger counts; what stands there is a function of it, so
nothing is restored but that number. The one thing that must stay true: after a resume at any
position the order goes on exactly as without the interruption, across epochs too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from posttrain.core import seeds
from posttrain.core.errors import DomainError
from posttrain.core.task import Task
from posttrain.domains.mixture import is_heldout, shared_content


@runtime_checkable
class Finite(Protocol):
    """A domain whose tasks are finite sets, one a level; all others are endless."""

    def all_tasks(self, level: int) -> Sequence[Task]:
        """The tasks of a level; number i is `task(i, level)`."""
        ...


class Epochs:
    """The training tasks of a finite set, epoch after epoch without end.

    Raises:
        DomainError: all of the tasks are held out.
    """

    def __init__(self, tasks: Sequence[Task], *, root_seed: int, heldout_share: float) -> None:
        own = {shared_content(t): t for t in tasks if not is_heldout(t, heldout_share)}
        if not own:
            raise DomainError(
                f"all {len(tasks)} tasks of the set are held out.",
                "write more tasks, or set a smaller domains.heldout_share",
            )
        self.tasks = tuple(own.values())
        """Each content once."""
        self._root_seed = root_seed
        self._set_key = set_key(self.tasks)
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def task(self, position: int) -> Task:
        """The task at a position, counted from 0."""
        epoch, place = divmod(position, len(self.tasks))
        return self._order(epoch)[place]

    def _shuffled(self, epoch: int) -> tuple[Task, ...]:
        order = list(self.tasks)
        seeds.stream(self._root_seed, "epoch", self._set_key, epoch).shuffle(order)
        return tuple(order)


def set_key(tasks: Sequence[Task]) -> str:
    """Hash of what the policy reads in a set: another one where a task came, went or changed."""
    return seeds.hex_key(*map(shared_content, tasks))
