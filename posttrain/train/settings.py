"""What a person can set about training. No torch, no I/O.

The one thing that must stay true: every field here changes the run, and unknown ones are refused.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from posttrain.core.config import Settings


class OptimizerSettings(Settings):
    """AdamW and its learning rate for one phase."""

    learning_rate: float = Field(default=1.2e-5, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(default=5, ge=0)
    """Steps of linear rise to the peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the fall after the warm-up."""
    total_steps: int = Field(default=100, ge=1)
    """Step at which `linear` and `cosine` reach their end; they stay there."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Where they end, as a fraction of the peak."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    clip_norm: float = Field(default=10.0, gt=0)
    """Gradients with a larger norm are scaled down to it."""


class SupervisedSettings(OptimizerSettings):
    """The same for the supervised phase, whose gradients are large at first."""

    learning_rate: float = Field(default=2e-5, gt=0)
    """Peak learning rate."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger norm are scaled down to it."""


class TrainSettings(Settings):
    """The trainer's settings."""

    algorithm: str = "dr_grpo"
    """A preset of `train.algorithms`: grpo, dr_grpo, dapo, rloo, gspo or cispo."""
    constant_length: int = Field(default=256, ge=1)
    """Tokens a reply counts as where the algorithm's normaliser is constant (dr_grpo): the cap on
    a reply's length.
    """
    kl_weight: float | None = Field(default=None, ge=0)
    """Weight of the KL to the starting weights on trained tokens; None: the algorithm's own."""
    importance_cap: float | None = Field(default=None, ge=1)
    """Cap of the truncated importance weight; None: the ratio is taken to the behaviour itself."""
    mask_truncated: bool = False
    """Leave attempts that were cut at a token limit out of the loss (they stay in the baseline)."""
    anchor_weight: float = Field(default=0.0, ge=0)
    """Weight of the KL from the starting weights on the anchor rows, against forgetting."""
    anchor_rows: int = Field(default=4, ge=1)
    """Anchor rows in each step."""
    micro_batch_tokens: int = Field(default=1024, ge=1)
    """Input tokens of one forward and backward pass: memory, and how long other work waits."""
    rl: OptimizerSettings = OptimizerSettings()
    sft: SupervisedSettings = SupervisedSettings()


def learning_rate_at(step: int, settings: OptimizerSettings) -> float:
    """Learning rate of a step, numbered from 1.

    >>> fall = dict(schedule="linear", total_steps=6)
    >>> plan = OptimizerSettings(learning_rate=1.0, warmup_steps=2, **fall)
    >>> [round(learning_rate_at(step, plan), 3) for step in (1, 2, 4, 6, 9)]
    [0.5, 1.0, 0.55, 0.1, 0.1]
    """
    assert step >= 1, f"steps are numbered from 1, got {step}"
    if step < settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    span = max(1, settings.total_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / span)
    fall = progress if settings.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * progress)
    return settings.learning_rate * (1.0 - (1.0 - settings.final_fraction) * fall)
