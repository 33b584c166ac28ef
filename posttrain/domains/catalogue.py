"""All known domains by name, and the functions over them that run in killable workers.

Names come from an explicit table of families, from the entry-point group `posttrain.domains`, and
from paths: `file.py:NAME` or a task set `file.toml`. Looking a name up imports no domain of others
and reads no file. The one thing that must stay true: code of a domain runs only in the functions
of the last section, which are called through `containment.Workers`, never in the loop's process.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from posttrain.core import codec
from posttrain.core.config import Settings
from posttrain.core.errors import DomainError, PosttrainError, UsageError, nearest
from posttrain.core.ports import Domain
from posttrain.core.task import Json, Oracle, Task
from posttrain.domains import mixture, outside
from posttrain.domains.adapters import reasoning_gym
from posttrain.domains.domain import check_contract
from posttrain.domains.epochs import Epochs, Finite, set_key
from posttrain.domains.families import terminal, toy
from posttrain.domains.mixture import Split
from posttrain.domains.presets import FAMILY as PRESET_FAMILY
from posttrain.domains.presets import PRESETS

T = TypeVar("T")

_SOURCES: Mapping[str, str] = {"reasoning_gym": "reasoning-gym"}


class DomainSpec(Settings):
    """One choice of domains in a configuration."""

    name: str
    """A catalogue name, a pattern (`reasoning_gym.*`), a path (`file.py:NAME`, `tasks.toml`); with
    `source`, a new name for that source under its own parameters."""
    levels: tuple[int, ...] = ()
    """Levels to draw from; empty: all of them."""
    weight: float = 1.0
    """Share of the draws, relative to the others; each domain of a pattern has it."""
    source: str = ""
    """Catalogue name that is parameterised; '': none."""
    params: dict[str, Any] | tuple[dict[str, Any], ...] = ()
    """Parameters for `source`: one table, or one a level, easiest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One domain of the catalogue."""

    name: str
    family: str
    source: str
    """Where it comes from: `built in`, a package, or a path."""
    levels: int | None
    """None: known only once its code has run (`describe`, in a worker)."""
    reference: Json
    """What the worker functions take: a name, or a name with source and parameters."""


class Family(Protocol):
    """A module that makes the domains of one family."""

    LEVELS: Mapping[str, int]
    """Kind → number of levels."""

    def domain(self, kind: str, *, name: str, params: Json = None) -> Domain:
        """The domain of a kind, under a name."""
        ...


FAMILIES: Mapping[str, Family] = {
    "toy": toy,
    "terminal": terminal,
    reasoning_gym.FAMILY: reasoning_gym,
}


# --- looking up -------------------------------------------------------------------------------


def entries() -> tuple[Entry, ...]:
    """Every named domain: families, presets, then those of other packages."""
    return (*_built_in().values(), *_announced())


@functools.cache
def _built_in() -> Mapping[str, Entry]:
    found = [
        Entry(
            name=f"{family}.{kind}",
            family=family,
            source=_SOURCES.get(family, "built in"),
            levels=levels,
            reference=f"{family}.{kind}",
        )
        for family in FAMILIES
        for kind, levels in sorted(FAMILIES[family].LEVELS.items())
    ]
    for kind, preset in PRESETS.items():
        name = f"{PRESET_FAMILY}.{kind}"
        found.append(
            Entry(
                name=name,
                family=PRESET_FAMILY,
                source=preset.source,
                levels=len(preset.params),
                reference=name,
            )
        )
    return {entry.name: entry for entry in found}


def _announced() -> list[Entry]:
    return [
        Entry(
            name=one.name,
            family=one.name.partition(".")[0],
            source=one.package,
            levels=None,
            reference=one.name,
        )
        for one in outside.announced()
    ]


def find(name: str) -> Entry:
    """The domain of a name or path.

    Raises:
        UsageError: there is none; the message names the nearest.
    """
    if outside.is_path(name):
        return Entry(name=name, family="", source=name, levels=None, reference=name)
    known = {entry.name: entry for entry in entries()}
    if name not in known:
        raise UsageError(
            f"unknown domain {name!r}{nearest(name, known)}.", "see `posttrain domains ls`"
        )
    return known[name]


def matching(pattern: str) -> tuple[Entry, ...]:
    """The domains of a name, path or pattern such as `terminal.*`, in catalogue order.

    Raises:
        UsageError: nothing matches.
    """
    if outside.is_path(pattern) or not set("*?[") & set(pattern):
        return (find(pattern),)
    found = tuple(entry for entry in entries() if fnmatch.fnmatchcase(entry.name, pattern))
    if not found:
        families = ", ".join(sorted({f"{entry.family}.*" for entry in entries()}))
        raise UsageError(f"no domain matches {pattern!r}.", f"use one of {families}")
    return found


def chosen(spec: DomainSpec) -> tuple[Entry, ...]:
    """The domains one choice of a configuration stands for.

    Raises:
        UsageError: nothing matches, or parameters without a source.
    """
    if not spec.source:
        if spec.params:
            raise UsageError(
                f"domain {spec.name!r} has params, but no source to apply them to.",
                "set source to a catalogue name and give the domain a name of its own",
            )
        return matching(spec.name)
    source = find(spec.source)
    if spec.name in {entry.name for entry in entries()}:
        raise UsageError(
            f"domain {spec.name!r} is in the catalogue already.", "choose another name"
        )
    reference = {"name": spec.name, "source": spec.source, "params": codec.to_json(spec.params)}
    return (
        Entry(
            name=spec.name,
            family=source.family,
            source=spec.source,
            levels=None,
            reference=reference,
        ),
    )


# --- loading: only where domain code may run ----------------------------------------------------


def load(reference: Json) -> Domain:
    """The domain of a reference: a name or path, or `{"name", "source", "params"}`.

    Raises:
        UsageError: unknown name, or parameters the source does not take.
        DomainError: its code raised while it was loaded.
    """
    return _load(json.dumps(reference, sort_keys=True))


@functools.lru_cache(maxsize=1024)
def _load(text: str) -> Domain:
    reference = json.loads(text)
    if isinstance(reference, Mapping):
        name, source = str(reference["name"]), str(reference["source"])
        params = reference["params"]
        family, _, kind = source.partition(".")
        if family not in FAMILIES:
            raise UsageError(f"domain {source!r} takes no params.")
        return _told(name, lambda: FAMILIES[family].domain(kind, name=name, params=params))
    name = str(reference)
    if outside.is_path(name):
        return _told(name, lambda: outside.load(name))
    family, _, kind = name.partition(".")
    if family == PRESET_FAMILY and kind in PRESETS:
        preset = PRESETS[kind]
        tables = codec.to_json(preset.params)
        return load({"name": name, "source": preset.source, "params": tables})
    if name in _built_in():
        return FAMILIES[family].domain(kind, name=name)
    find(name)
    return _told(name, lambda: outside.load_announced(name))


def _told(name: str, act: Callable[[], T]) -> T:
    """The result of an act of a domain; what its code raises becomes a DomainError that names it.

    Raises:
        DomainError: it raised something that is not ours.
    """
    try:
        return act()
    except PosttrainError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}{outside.place(error)}"
        raise DomainError(f"domain {name!r} raised {told}") from error


# --- functions for workers: JSON in, JSON out ---------------------------------------------------

MAX_TASK_CHARS = 4 << 20
"""A larger task, as JSON, is a flood: it would be tokenised and kept in the run's own process."""


def describe(reference: Json) -> Json:
    """Name and number of levels, `{"name": …, "levels": …}`, and for a finite domain `set_keys`,
    one a level; or `{"refused": [message, next step]}` where a person asked for a file, name or
    parameter that is not there, or for a file that is no Python.
    """
    try:
        domain = load(reference)
    except (UsageError, DomainError) as error:
        if isinstance(error, DomainError) and not isinstance(error.__cause__, SyntaxError):
            raise
        return {"refused": [error.message, error.next_step]}
    told = {"name": domain.name, "levels": domain.levels}
    if not isinstance(domain, Finite):
        return told
    return {**told, "set_keys": [set_key(_set(domain, n)) for n in range(domain.levels)]}


def tasks(reference: Json, pairs: Sequence[tuple[int, int]]) -> list[Json]:
    """The tasks of [seed, level] pairs.

    Raises:
        DomainError: the domain raised; the message names it, the seed and the level.
    """
    domain = load(reference)
    return [codec.to_json(_task(domain, seed, level)) for seed, level in pairs]


def peak_bytes() -> int:
    """The most memory that this process had in use at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def oracles(reference: Json, given: Sequence[Json]) -> list[Json]:
    """The reference solutions of tasks."""
    domain = load(reference)
    return [codec.to_json(_oracle(domain, codec.from_json(Task, one))) for one in given]


def contract(reference: Json, pairs: Sequence[tuple[int, int]]) -> list[str]:
    """What is wrong with the tasks of [seed, level] pairs, as sentences."""
    domain = load(reference)
    return [
        f"{domain.name}, seed {seed}, level {level}: {problem}"
        for seed, level in pairs
        for problem in _told(
            domain.name, functools.partial(check_contract, domain, seed=seed, level=level)
        )
    ]


def pool(
    reference: Json, level: int, root_seed: int, count: int, split: str, heldout_share: float
) -> list[Json]:
    """`count` tasks of a split (`train` or `heldout`) with no content twice, in a fixed order; all
    there are where the domain has fewer.

    Raises:
        DomainError: the domain raised.
    """
    domain = load(reference)
    found = mixture.distinct(
        lambda seed: _task(domain, seed, level),
        key=mixture.Key(domain=domain.name, level=level, reference=reference),
        root_seed=root_seed,
        count=count,
        split=Split(split),
        heldout_share=heldout_share,
    )
    return [codec.to_json(task) for task in found]


def drawn(
    reference: Json, level: int, root_seed: int, numbers: Sequence[int], heldout_share: float
) -> list[Json]:
    """The training tasks of draw numbers at one level, or of positions in the epochs of a finite
    set; none of them is held out.

    Raises:
        DomainError: the domain raised, or nearly all of its tasks are held out.
    """
    domain = load(reference)
    if isinstance(domain, Finite):
        epochs = _epochs(json.dumps(reference, sort_keys=True), level, root_seed, heldout_share)
        return [codec.to_json(epochs.task(number)) for number in numbers]
    key = mixture.Key(domain=domain.name, level=level, reference=reference)
    return [
        codec.to_json(
            mixture.training_task(
                lambda seed: _task(domain, seed, level),
                key=key,
                root_seed=root_seed,
                number=number,
                heldout_share=heldout_share,
            )
        )
        for number in numbers
    ]


@functools.lru_cache(maxsize=64)
def _epochs(text: str, level: int, root_seed: int, heldout_share: float) -> Epochs:
    tasks = _set(_load(text), level)
    return Epochs(tasks, root_seed=root_seed, heldout_share=heldout_share)


def _set(domain: Domain, level: int) -> Sequence[Task]:
    assert isinstance(domain, Finite), f"{domain.name} has no end of tasks"
    return _told(domain.name, functools.partial(domain.all_tasks, level))


def _task(domain: Domain, seed: int, level: int) -> Task:
    where = f"{domain.name} (seed {seed}, level {level})"
    task = _told(where, lambda: domain.task(seed, level))
    size = len(json.dumps(_told(where, lambda: codec.to_json(task))))
    if size > MAX_TASK_CHARS:
        raise DomainError(
            f"domain {where!r} made a task of {size:,} characters.",
            f"keep tasks below {MAX_TASK_CHARS:,}, files and checks included",
        )
    return task


def _oracle(domain: Domain, task: Task) -> Oracle:
    return _told(task.id, lambda: domain.oracle(task))
