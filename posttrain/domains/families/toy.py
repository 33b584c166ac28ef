"""A tiny family without dependencies, for tests and the preset `smoke`.

A tiny random model learns the easiest levels by reinforcement within a minute; they measure the
machinery, not a model. The one thing that must stay true: every answer can be read off the prompt.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from posttrain.core import seeds
from posttrain.core.errors import UsageError
from posttrain.core.ports import Domain
from posttrain.core.task import Json, Oracle, Task
from posttrain.domains import domain as build


class Puzzle(NamedTuple):
    """What a kind makes from chance and a level."""

    objective: str
    answer: str


def _digit(draw: random.Random, level: int) -> Puzzle:
    """Level 0 knows two answers, level 1 ten, level 2 two digits in a row."""
    choices = "12" if level == 0 else string.digits
    answer = "".join(draw.choices(choices, k=2 if level == 2 else 1))
    noise = draw.choices(string.ascii_lowercase, k=2)
    return Puzzle(f"Digit in {noise[0]}{noise[1]}{answer}?", answer)


def _copy(draw: random.Random, level: int) -> Puzzle:
    answer = "".join(draw.choices(string.ascii_lowercase, k=(2, 4, 8)[level]))
    return Puzzle(f"Copy: {answer}", answer)


def _order(draw: random.Random, level: int) -> Puzzle:
    letters = draw.sample(string.ascii_lowercase, (2, 3, 5)[level])
    return Puzzle(f"Sort: {''.join(letters)}", "".join(sorted(letters)))


KINDS: Mapping[str, Callable[[random.Random, int], Puzzle]] = {
    "digit": _digit,
    "copy": _copy,
    "sort": _order,
}
LEVELS: Mapping[str, int] = dict.fromkeys(KINDS, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """One kind of toy puzzle as a domain."""

    name: str
    make: Callable[[random.Random, int], Puzzle]
    levels: int = 3

    def task(self, seed: int, level: int) -> Task:
        """The puzzle of a seed at a level."""
        build.in_levels(self, level)
        puzzle = self.make(seeds.stream(self.name, level, seed), level)
        return build.answer_task(
            puzzle.objective,
            domain=self.name,
            seed=seed,
            level=level,
            answer=puzzle.answer,
            constraints=(),
        )

    def oracle(self, task: Task) -> Oracle:
        """The answer."""
        return build.answer_oracle(task)


def domain(kind: str, *, name: str, params: Json = None) -> Domain:
    """The domain of a kind. Toy kinds take no parameters.

    Raises:
        UsageError: parameters were given.
    """
    if params:
        raise UsageError(f"domain 'toy.{kind}' takes no params, got {params!r:.80}.")
    return Toy(name=name, make=KINDS[kind])
