"""The rows that hold the weights near where they started: other tasks, the starting model's words.

What is done with them is `train.anchor`'s. The one thing that must stay true: no watched domain is
among them (`loop.wiring` refuses it), for then nothing would be watched any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from posttrain.core.errors import ConfigError
from posttrain.core.ports import AttemptRequest
from posttrain.core.trajectory import AttemptKey, Row, Sampling
from posttrain.domains.mixture import Key, Split
from posttrain.domains.supply import Supply
from posttrain.rollout.group import Groups


async def anchor_rows(
    keys: Sequence[Key], *, count: int, supply: Supply, groups: Groups, sampling: Sampling
) -> list[Row]:
    """Training tasks of the keys, about `count` in all, with replies of the weights as they are.

    Raises:
        ConfigError: there is no key.
        DomainError: a domain cannot make its tasks.
    """
    if not keys:
        raise ConfigError(
            "train.anchor_weight is set, but domains.anchor names no domain.",
            "name domains that are neither trained on nor watched, or set the weight to 0",
        )
    share = -(-count // len(keys))
    tasks = [
        task
        for key in keys
        for task in await supply.pool(key, root_seed=sampling.seed, count=share, split=Split.TRAIN)
    ]
    requests = [
        AttemptRequest(
            key=AttemptKey(run="anchor", draw=draw, member=0), task=task, sampling=sampling
        )
        for draw, task in enumerate(tasks)
    ]
    made = await asyncio.gather(*(groups.attempt(request) for request in requests))
    return [row for trajectory in made for row in trajectory.rows if row.num_trained]
