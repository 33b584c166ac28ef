"""Draws over the mixture of domains: which key a draw falls on, and its task from a worker.

It moves no weights and keeps no state. The one thing that must stay true: a draw's decision
depends on its number, the seed of the run and the quarantined domains alone, and its task on the
decision and on how many draws fell on a finite set before.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from posttrain.core.errors import ConfigError, DomainError, nearest
from posttrain.core.events import Drawn
from posttrain.core.task import Oracle, Task
from posttrain.domains.mixture import Key, Mixture
from posttrain.domains.supply import Supply
from posttrain.loop.moves import Phase


def sources(
    keys: Sequence[Key], *, root_seed: int, sft_weights: Mapping[str, float]
) -> dict[Phase, Mixture]:
    """What decides a phase's draws. `sft_weights`: domain → share of the supervised draws instead
    of its weight in the mixture.

    Raises:
        ConfigError: `sft_weights` names a domain that is not among the keys, or leaves none.
    """
    return {
        Phase.SFT: Mixture(_weighed(keys, sft_weights), root_seed=root_seed),
        Phase.RL: Mixture(keys, root_seed=root_seed),
    }


class SupplyTasks:
    """`loop.parts.Tasks`, and oracles, from killable workers."""

    def __init__(
        self,
        supply: Supply,
        keys: Sequence[Key],
        *,
        root_seed: int,
        max_context_tokens: int = sys.maxsize,
    ) -> None:
        """`max_context_tokens` is the model's: no task may ask for more, or a domain that floods
        would fill the trainer's memory by its reference solutions.
        """
        self._supply = supply
        self._max_context_tokens = max_context_tokens
        self._root_seed = root_seed
        self._keys: Mapping[tuple[str, int], Key] = {(k.domain, k.level): k for k in keys}

    async def task(self, drawn: Drawn) -> Task:
        """See the port."""
        key = self._key(drawn.domain, drawn.level)
        number = drawn.place if key.set_key else drawn.draw
        tasks = await self._supply.drawn(key, root_seed=self._root_seed, numbers=[number])
        limits = tasks[0].limits
        most = min(limits.max_context_tokens, self._max_context_tokens)
        return replace(tasks[0], limits=replace(limits, max_context_tokens=most))

    async def oracle(self, task: Task) -> Oracle:
        """The reference solution of a task.

        Raises:
            DomainError: the domain raised, hung or died.
        """
        oracles = await self._supply.oracles(self._key(task.domain, task.level), [task])
        return oracles[0]

    def _key(self, domain: str, level: int) -> Key:
        try:
            return self._keys[domain, level]
        except KeyError:
            raise DomainError(
                f"domain {domain!r} at level {level} is not in this run's mixture any more.",
                "resume with the configuration the run was started with",
            ) from None


def _weighed(keys: Sequence[Key], weights: Mapping[str, float]) -> list[Key]:
    """The keys under other weights; a domain's weight is split evenly over its levels."""
    levels = Counter(key.domain for key in keys)
    for name in weights:
        if name not in levels:
            raise ConfigError(
                f"sft.weights names {name!r}, which is not trained on{nearest(name, levels)}.",
                "add it to domains.train, or take it out of sft.weights",
            )
    shares = [
        replace(key, weight=weights[key.domain] / levels[key.domain])
        if key.domain in weights
        else key
        for key in keys
    ]
    left = [key for key in shares if key.weight > 0]
    if not left:
        raise ConfigError("sft.weights leaves no domain to draw from.", "give one a weight above 0")
    return left
