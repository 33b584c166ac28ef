"""Beginning a run, or going on with one: from what its ledger says to a driver that is ready.

It repairs nothing and guesses nothing. The one thing that must stay true: the weights a resumed
run goes on with are those of the checkpoint that its `rewound` event names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from posttrain.core import events, toml
from posttrain.core.errors import CheckpointError
from posttrain.core.task import Json
from posttrain.loop.book import Book
from posttrain.loop.driver import Driver
from posttrain.loop.moves import LoopPlan
from posttrain.loop.parts import Parts
from posttrain.loop.past import Past


async def prepare(
    parts: Parts, plan: LoopPlan, past: Past, *, config: Mapping[str, Json]
) -> Driver:
    """A driver for the run whose past this is (an empty one: a new run). `config`: every setting.

    A resumed run goes back to the newest checkpoint of its surviving weights that reads back
    whole. Where a newer one does not, that is said aloud; where none does, nothing is begun.

    Raises:
        CheckpointError: there are checkpoints and none of them can be read.
        LedgerError: the ledger cannot be written.
    """
    book = Book(parts.records, past)
    resumed, before = past.starts > 0, past.config
    sha256 = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    book.write(events.Started(run=parts.run, config_sha256=sha256, resumed=resumed, config=config))
    if not resumed:
        book.sync()
        return Driver(parts, plan, past)
    if before and (changed := differing(before, config)):
        named = ", ".join(changed)
        book.warn(f"The configuration differs from the one of the run's last start in {named}.")
    saved = await _rewind(parts, book)
    book.sync()
    return Driver(parts, plan, past, saved=saved)


def differing(one: Mapping[str, Json], other: Mapping[str, Json]) -> list[str]:
    """The settings in which two configurations differ.

    >>> differing({"rl": {"steps": 40, "tries": 3}}, {"rl": {"steps": 44, "tries": 3}})
    ['rl.steps']
    """
    before, after = dict(toml.leaves(one)), dict(toml.leaves(other))
    paths = dict.fromkeys([*before, *after])
    return [toml.dotted(path) for path in paths if before.get(path) != after.get(path)]


async def _rewind(parts: Parts, book: Book) -> Mapping[str, Json]:
    """Load the newest good checkpoint; returns what was saved beside the weights."""
    past, damaged = book.past, []
    for saved in reversed(past.saved):
        try:
            extra = await parts.trainer.load(parts.directory / saved.path)
        except CheckpointError as error:
            damaged.append(error)
            book.warn(f"Checkpoint {saved.path} is left out: {error.message}")
            continue
        book.write(events.Rewound(step=saved.step, version=saved.version))
        for sink in parts.sinks:
            await sink.publish(version=saved.version, parent=0)  # a sink is new
        book.announce(f"going on after step {saved.step}", step=saved.step)
        return extra
    if damaged:
        raise CheckpointError(
            f"None of the {len(damaged)} checkpoints of this run can be read: {damaged[0].message}",
            f"restore {parts.directory / 'checkpoints'} from a copy, or start a new run.",
        )
    book.write(events.Rewound(step=0, version=0))
    return {}
