"""Policy-gradient algorithms as values of one loss: what they compare, clip and divide by.

A preset is data; `losses.policy_loss` is the only code. The one thing that must stay true: two
algorithms differ in nothing but the fields below. All of them compare the policy with the
recorded log-probabilities of the behaviour policy, because one batch is trained on once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from posttrain.core.errors import ConfigError, nearest
from posttrain.train.advantages import Baseline


class Level(StrEnum):
    """Over what the importance ratio is taken."""

    TOKEN = "token"
    """exp(d_t) for each token, d = log-probability now - then."""
    SEQUENCE = "sequence"
    """exp(sum of d) over the trained tokens of a row."""
    GEOMETRIC = "geometric"
    """exp(mean of d) over the trained tokens of a row."""


class Surrogate(StrEnum):
    """How the ratio enters the loss."""

    CLIP = "clip"
    """-min(ratio·A, clip(ratio)·A): outside the clip range there is no gradient."""
    WEIGHT = "weight"
    """-stop_gradient(clip(ratio))·A·log π: every token keeps its gradient."""


class Normaliser(StrEnum):
    """What the sum over tokens is divided by; always taken over the whole batch."""

    TOKEN_MEAN = "token_mean"
    """Number of trained tokens."""
    SEQUENCE_MEAN = "sequence_mean"
    """Trained tokens of the attempt, then number of attempts."""
    CONSTANT = "constant"
    """Number of attempts times a constant length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One point in the space of policy losses."""

    source: str
    """Paper and equation."""
    baseline: Baseline = Baseline.MEAN
    divide: bool = False
    """Divide advantages by the group's deviation."""
    level: Level = Level.TOKEN
    surrogate: Surrogate = Surrogate.CLIP
    clip_low: float | None = None
    """Lower clip bound is 1 - clip_low; None: no lower bound."""
    clip_high: float | None = None
    """Upper clip bound is 1 + clip_high; None: no upper bound."""
    normaliser: Normaliser = Normaliser.TOKEN_MEAN
    kl_weight: float = 0.0
    """Weight of the k3 estimate of KL(policy ‖ reference), where the settings name none."""


ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(
        source="DeepSeekMath, arXiv 2402.03300, equations 3 and 4; beta 0.04 of section 4.2",
        divide=True,
        clip_low=0.2,
        clip_high=0.2,
        normaliser=Normaliser.SEQUENCE_MEAN,
        kl_weight=0.04,
    ),
    "dr_grpo": Algorithm(
        source="Understanding R1-Zero-like training, arXiv 2503.20783, section 3.2: neither the "
        "deviation nor the length of the reply divides",
        clip_low=0.2,
        clip_high=0.2,
        normaliser=Normaliser.CONSTANT,
    ),
    "dapo": Algorithm(
        source="DAPO, arXiv 2503.14476, equation 8; token mean over the whole batch",
        divide=True,
        clip_low=0.2,
        clip_high=0.28,
    ),
    "rloo": Algorithm(
        source="Back to basics, arXiv 2402.14740, section 3: REINFORCE on whole replies with the "
        "mean of the others as baseline; off-policy replies by their product ratio",
        baseline=Baseline.LEAVE_ONE_OUT,
        level=Level.SEQUENCE,
        normaliser=Normaliser.SEQUENCE_MEAN,
    ),
    "gspo": Algorithm(
        source="GSPO, arXiv 2507.18071, equations 5 to 7; clip range of section 5.1",
        divide=True,
        level=Level.GEOMETRIC,
        clip_low=3e-4,
        clip_high=4e-4,
        normaliser=Normaliser.SEQUENCE_MEAN,
    ),
    "cispo": Algorithm(
        source="MiniMax-M1, arXiv 2506.13585, equations 4 and 5 (no lower bound); upper bound 5 "
        "from ScaleRL, arXiv 2510.13786",
        divide=True,
        surrogate=Surrogate.WEIGHT,
        clip_high=4.0,
    ),
}


def algorithm(name: str) -> Algorithm:
    """The preset of a name.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in ALGORITHMS:
        raise ConfigError(
            f"unknown algorithm {name!r}{nearest(name, ALGORITHMS)}.",
            f"use one of {', '.join(sorted(ALGORITHMS))}",
        )
    return ALGORITHMS[name]
