"""The settings of a run: what one key leaves alone, and what the presets measured keep."""

from __future__ import annotations

import typing
from collections.abc import Iterator

import pytest

from posttrain.core import config
from posttrain.core.config import Settings
from posttrain.loop.settings import RunConfig
from tests.loop.smoke_run import settings


def sections(value: Settings) -> Iterator[Settings]:
    yield value
    for name in type(value).model_fields:
        inner = getattr(value, name)
        if isinstance(inner, Settings):
            yield from sections(inner)


def test_a_section_of_which_one_key_is_set_keeps_its_other_defaults() -> None:
    """`train.sft.warmup_steps` alone changed the learning rate and the clipping of that phase."""
    for section in sections(RunConfig()):
        assert section == type(section)(), type(section).__name__
    chosen = config.load(RunConfig, overrides=["train.sft.warmup_steps=3"]).value.train.sft
    assert (chosen.warmup_steps, chosen.learning_rate, chosen.clip_norm) == (3, 2e-5, 1.0)
    assert typing.get_type_hints(type(RunConfig().train))["sft"] is type(chosen)


@pytest.mark.parametrize(
    ("preset", "rates", "clips"),
    [
        ("demo", (3e-5, 1.5e-5), (10.0, 10.0)),
        ("smoke", (3e-3, 5e-3), (10.0, 10.0)),
        ("laptop", (3e-5, 1.2e-5), (10.0, 10.0)),
    ],
)
def test_each_preset_trains_with_the_rates_and_clipping_it_was_measured_with(
    preset: str, rates: tuple[float, float], clips: tuple[float, float]
) -> None:
    train = settings(preset=preset).train
    assert (train.sft.learning_rate, train.rl.learning_rate) == rates
    assert (train.sft.clip_norm, train.rl.clip_norm) == clips
