"""Which domain, level and task seed a draw stands for, and which tasks are held out.

Everything is a function of the root seed and the draw number, so the position in the data is the
number of the next draw and nothing else. It runs no domain: tasks are handed in by functions. The
one thing that must stay true: no task of training has the content of a held-out task.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from posttrain.core import seeds
from posttrain.core.errors import DomainError, UsageError
from posttrain.core.task import Json, Task

HELDOUT_SHARE = 0.2
"""Share of a domain's contents that is held out, by default."""
_PATIENCE = 600
"""Seeds in a row that may bring nothing new before a question space counts as exhausted."""
_REDRAWS = 64


class Split(StrEnum):
    """The two sides of the data."""

    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One source of tasks: a domain at a level."""

    domain: str
    level: int
    reference: Json
    """What the worker functions of the catalogue take."""
    weight: float = 1.0
    """Share of the draws, relative to the other keys."""
    set_key: str = ""
    """Hash of its tasks where they are a finite set; '': there is no end of them."""

    @property
    def id(self) -> str:
        """Readable identity."""
        return f"{self.domain}/{self.level}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One sampling decision."""

    number: int
    key: Key
    seed: int
    """Seed of the task; `training_task` may pass on to later ones where it is held out."""


class Mixture:
    """Keys with weights; a draw number picks one of them, always the same."""

    def __init__(self, keys: Sequence[Key], *, root_seed: int) -> None:
        """Raises UsageError where there is no key, a key twice, or a weight of 0 or less."""
        if not keys:
            raise UsageError("the mixture has no domain.", "name at least one to train on")
        seen: set[str] = set()
        for key in keys:
            if key.id in seen:
                raise UsageError(f"domain {key.domain!r} is in the mixture twice.", "name it once")
            if not key.weight > 0:
                raise UsageError(f"wanted a weight above 0 for {key.domain!r}, got {key.weight}.")
            seen.add(key.id)
        self.keys = tuple(keys)
        self.root_seed = root_seed

    def draw(self, number: int, *, without: frozenset[str] = frozenset()) -> Draw | None:
        """The decision of a draw number, by the weights of the keys whose domains are not left
        out (quarantined); None: nothing is left.
        """
        keys = [key for key in self.keys if key.domain not in without]
        if not keys:
            return None
        reached = list(itertools.accumulate(key.weight for key in keys))
        point = seeds.unit(self.root_seed, "mixture", number) * reached[-1]
        index = min(bisect.bisect_right(reached, point), len(keys) - 1)
        return self.drawn(number, keys[index])

    def drawn(self, number: int, key: Key) -> Draw:
        """The decision of a draw number whose key something else has chosen."""
        seed = task_seed(self.root_seed, key, Split.TRAIN, number)
        return Draw(number=number, key=key, seed=seed)


def keys_of(
    domain: str,
    *,
    levels: int,
    reference: Json,
    wanted: Sequence[int] = (),
    weight: float = 1.0,
    set_keys: Sequence[str] = (),
) -> tuple[Key, ...]:
    """The keys of a domain with that many levels; its weight is shared by the wanted levels.
    `set_keys`: one a level, where the domain is finite.

    Raises:
        UsageError: a level that it does not have, or one twice.
    """
    chosen = tuple(wanted) or tuple(range(levels))
    for level in chosen:
        if not 0 <= level < levels or chosen.count(level) > 1:
            known = f"levels 0 to {levels - 1}, each once"
            raise UsageError(f"domain {domain!r} has {known}; got level {level} of {list(chosen)}.")
    share = weight / len(chosen)
    sets = tuple(set_keys) or ("",) * levels
    return tuple(
        Key(domain=domain, level=level, reference=reference, weight=share, set_key=sets[level])
        for level in chosen
    )


def task_seed(root_seed: int, key: Key, split: Split, number: int, redraw: int = 0) -> int:
    """The hashed seed of a task; neighbouring numbers share nothing."""
    return seeds.hashed(root_seed, split.value, key.domain, key.level, number, redraw)


# --- the split --------------------------------------------------------------------------------


def is_heldout(task: Task, share: float = HELDOUT_SHARE) -> bool:
    """Whether a task belongs to the held-out side: a matter of its content, not of its seed.

    The domain's name plays no part, so the same question under two names stays on one side.
    """
    return seeds.unit("heldout", shared_content(task)) < share


def shared_content(task: Task) -> str:
    """Hash of what the policy reads, whichever domain and level it comes from."""
    environment = task.environment
    laid = sorted(environment.files.items()) if environment is not None else []
    parts = [task.description.objective, *task.description.constraints]
    return seeds.hex_key(len(parts), *parts, *itertools.chain.from_iterable(laid))


def training_task(
    make: Callable[[int], Task], *, key: Key, root_seed: int, number: int, heldout_share: float
) -> Task:
    """The task of a draw: the first of its seeds that is not held out.

    Raises:
        DomainError: all of its seeds are.
    """
    for redraw in range(_REDRAWS):
        task = make(task_seed(root_seed, key, Split.TRAIN, number, redraw))
        if not is_heldout(task, heldout_share):
            return task
    raise DomainError(
        f"{key.id}: {_REDRAWS} seeds in a row gave only held-out tasks (draw {number}).",
        "the question space is tiny; use a larger one or a smaller held-out share",
    )


def distinct(
    make: Callable[[int], Task],
    *,
    key: Key,
    root_seed: int,
    count: int,
    split: Split,
    heldout_share: float = HELDOUT_SHARE,
) -> list[Task]:
    """`count` tasks of a split, no content twice, by a bounded search through hashed seeds; fewer
    where the question space holds no more.
    """
    found: dict[str, Task] = {}
    everything: set[str] = set()
    number = idle = 0
    while len(found) < count:
        task = make(task_seed(root_seed, key, split, number))
        content = shared_content(task)
        number, idle = number + 1, idle + 1
        if content not in everything:
            everything.add(content)
            if is_heldout(task, heldout_share) == (split is Split.HELDOUT):
                found[content], idle = task, 0
        if idle > _PATIENCE + count:
            break
    return list(found.values())
