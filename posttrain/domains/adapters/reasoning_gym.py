"""Adapter for reasoning-gym: its generators as domains, its scorers behind a worker function.

Not trusted as they are: measured on its 105 generators, eleven scorers pay for an empty answer, 32
for the echoed prompt, 14 for junk. `score` therefore refuses what is no answer and pays 1 for a
score of 0.99 or more, else 0. The one thing that must stay true: reasoning-gym is imported only
inside functions that run in a killable worker, and a task is the same on every machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import functools
import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.core import seeds
from posttrain.core.errors import UsageError, nearest
from posttrain.core.ports import Domain
from posttrain.core.task import Check, Json, Oracle, Task
from posttrain.domains import domain as build
from posttrain.domains.adapters import reasoning_gym_levels as table
from posttrain.domains.adapters.lossless import decode, encode
from posttrain.domains.adapters.reasoning_gym_answers import passes

FAMILY = "reasoning_gym"
PAID_SCORE = 1.0 - 1e-6
"""A foreign score of at least this is paid with 1, any other with 0."""
LEVELS: Mapping[str, int] = {
    **{name: len(levels) for name, levels in table.LEVELS.items()},
    **dict.fromkeys(table.WITHOUT_CURRICULUM, 1),
}
Params = Mapping[str, Json]
"""Arguments of a generator's configuration."""
Setting = Mapping[str, Json]
"""Either `{"params": …}` or `{"level": …}`: which configuration an entry was made with."""
_TRIES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGym:
    """One generator as a domain; with `params`, a parameterisation of one's own, one a level."""

    name: str
    generator: str
    params: tuple[Params, ...] = ()

    @property
    def levels(self) -> int:
        """One a parameterisation, or those of the curriculum."""
        return len(self.params) or LEVELS[self.generator]

    def task(self, seed: int, level: int) -> Task:
        """The generated question of a seed at a level."""
        build.in_levels(self, level)
        setting = {"params": self.params[level]} if self.params else {"level": level}
        entry = generate(self.generator, setting, seed=seed)
        gold = _gold(self.generator, entry)
        kept = {**entry, "answer": gold, "setting": setting}
        return build.answer_task(
            str(entry["question"]).strip(),
            domain=self.name,
            seed=seed,
            level=level,
            answer=gold,
            check=Check(kind=FAMILY, params={"dataset": self.generator, "entry": encode(kept)}),
        )

    def oracle(self, task: Task) -> Oracle:
        """The generator's own answer."""
        return build.answer_oracle(task)


def domain(kind: str, *, name: str, params: Json = None) -> Domain:
    """The domain of a generator; `params` is a table of its configuration, or a list of tables,
    one a level. Checking them imports reasoning-gym.

    Raises:
        UsageError: a parameter that the generator does not have, or a value it refuses.
    """
    tables = [params] if isinstance(params, Mapping) else list(params or ())
    for arguments in tables:
        _check_params(kind, arguments)
    return ReasoningGym(name=name, generator=kind, params=tuple(tables))


def score(dataset: str, entry: Json, answer: str) -> float:
    """What an answer is paid, 1.0 or 0.0; a worker function.

    `entry` is the check's: question, answer, metadata and setting, in lossless JSON.

    Raises:
        UsageError: no such generator.
    """
    if dataset not in LEVELS:
        raise UsageError(f"unknown generator {dataset!r}{nearest(dataset, LEVELS)}.")
    original = decode(entry)
    given, gold, question = (
        text.strip() for text in (answer, str(original["answer"]), str(original["question"]))
    )
    if not passes(dataset, given, gold=gold, question=question):
        return 0.0
    if dataset in table.COMPARED:
        return float(_plain(given) == _plain(gold))
    try:
        scorer = _kept(dataset, json.dumps(original["setting"], sort_keys=True))
        with decimal.localcontext(decimal.Context()):
            raw = scorer.score_answer(given, original)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError):
        # The scorers parse answers with bare int(), float() and indexing: an answer that does not
        # parse is no answer. The oracle of every generator scores 1, so entries do parse.
        return 0.0
    return float(float(raw) >= PAID_SCORE)


def _plain(text: str) -> str:
    """Text as it is compared: case and the space around commas do not count."""
    return ",".join(part.strip() for part in text.casefold().split(","))


# --- generation -------------------------------------------------------------------------------


def generate(generator: str, setting: Setting, *, seed: int) -> dict[str, Any]:
    """One entry: question, answer, metadata. Same arguments, same entry, on every machine.

    Some generators give up on some seeds, or give an answer that is none (`Integral(…)`, which
    merely repeats the question); then the next hashed seed is tried, a few times.
    """
    text = json.dumps(setting, sort_keys=True)
    for number in range(_TRIES):
        try:
            entry = _entry(generator, text, seeds.hashed(generator, text, seed, number))
            break
        except (ValueError, RuntimeError, IndexError):
            if number == _TRIES - 1:
                raise
    if generator == "polynomial_multiplication":
        entry["metadata"]["variables"].sort()
    return {key: entry[key] for key in ("question", "answer", "metadata")}


def _entry(generator: str, setting: str, seed: int) -> dict[str, Any]:
    with _seeded(seed):
        if generator in table.READS_FILES:
            dataset = _kept(generator, setting)
            dataset.seed = seed % 2**31
            if generator == "codeio":  # it reads its class, where the last one's data are
                type(dataset)._jsonl_data = dataset._jsonl_data
        else:
            dataset = _dataset(generator, _arguments(generator, setting), seed=seed % 2**31)
        entry: dict[str, Any] = dataset[0]
    gold, question = _gold(generator, entry), str(entry["question"]).strip()
    if not passes(generator, gold.strip(), gold=gold, question=question):
        raise ValueError(f"{generator} gave {gold!r:.80} as its answer to seed {seed}")
    return entry


def _gold(generator: str, entry: Mapping[str, Any]) -> str:
    """The answer, or the example that stands in for it."""
    key = table.EXAMPLE_KEYS.get(generator)
    if key is None:
        return str(entry["answer"])
    example = entry["metadata"][key]
    return example if isinstance(example, str) else json.dumps(example)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Fix the module-wide random states, which a few generators read, and put them back; so the
    precision of decimals, which one of them sets for all.
    """
    import numpy as np

    before, before_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with decimal.localcontext(decimal.Context()):
            yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)


def _dataset(generator: str, arguments: Params, *, seed: int) -> Any:
    from reasoning_gym.factory import DATASETS

    kind, config_kind = DATASETS[generator]
    given = {
        key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()
    }
    config = config_kind(**{**given, "seed": seed, "size": 1})
    if hasattr(config, "validate"):
        config.validate()
    dataset = kind(config=config)
    _order_sets(generator, dataset)
    return dataset


@functools.lru_cache(maxsize=64)
def _kept(generator: str, setting: str) -> Any:
    """The dataset of a setting: what scores (some scorers read its configuration)."""
    dataset = _dataset(generator, _arguments(generator, setting), seed=0)
    if generator == "codeio":
        dataset._jsonl_data = type(dataset)._jsonl_data
    return dataset


def _arguments(generator: str, setting: str) -> Params:
    """Arguments of the generator's configuration; a level sets every attribute of the curriculum
    to the same step.
    """
    wanted = json.loads(setting)
    if "params" in wanted:
        return dict(wanted["params"])
    if generator in table.WITHOUT_CURRICULUM:
        return {}
    from reasoning_gym.factory import CURRICULA

    curriculum = CURRICULA[generator]()
    curriculum.set_global_level(table.LEVELS[generator][wanted["level"]])
    config = curriculum.generate_configuration()
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _check_params(generator: str, arguments: Json) -> None:
    from reasoning_gym.factory import DATASETS

    if not isinstance(arguments, Mapping):
        raise UsageError(f"params of {generator!r} must be a table, got {arguments!r:.80}.")
    config_kind = DATASETS[generator][1]
    known = {field.name for field in dataclasses.fields(config_kind)} - {"seed", "size"}
    for key in arguments:
        if key not in known:
            raise UsageError(
                f"generator {generator!r} has no parameter {key!r}{nearest(key, known)}.",
                f"use one of {', '.join(sorted(known))}",
            )
    try:
        _dataset(generator, arguments, seed=0)
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"generator {generator!r} refuses {dict(arguments)!r}: {error}") from error


# --- chance that hangs on the hash seed ----------------------------------------------------------


class _Ordered(frozenset[Any]):
    """A set that is iterated in order, so that a choice from it does not hang on hashing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=str))

    def __sub__(self, other: Any) -> _Ordered:
        return _Ordered(super().__sub__(other))


def _order_sets(generator: str, dataset: Any) -> None:
    """Five generators choose from sets of strings, whose order changes with every process."""
    if generator in ("isomorphic_strings", "ransom_note"):
        dataset.letters = _Ordered(dataset.letters)
    elif generator == "word_ladder":
        for graph in dataset.word_graphs.values():
            for word, neighbours in graph.items():
                graph[word] = sorted(neighbours)
    elif generator == "knight_swap":
        vars(sys.modules[type(dataset).__module__])["frozenset"] = _Ordered
    elif generator == "polynomial_multiplication":
        unordered = dataset._get_monomials
        dataset._get_monomials = lambda rng: sorted(unordered(rng), key=str)
