"""Where the time of a run went, and what it cost.

Not a profiler: it divides a wall-clock duration among five uses, from totals that others measured.
The one thing that must stay true: the parts of a `TimeSplit` are never negative and sum to its
wall time.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Wall seconds by use; `idle_s` is what remains."""

    generate_s: float = 0.0
    execute_s: float = 0.0
    verify_s: float = 0.0
    train_s: float = 0.0
    idle_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """The whole."""
        return self.generate_s + self.execute_s + self.verify_s + self.train_s + self.idle_s

    def share(self) -> dict[str, float]:
        """Part of the whole by use, summing to 1 (all 0 where no time passed).

        >>> TimeSplit(generate_s=3.0, train_s=1.0).share()["generate"]
        0.75
        """
        wall_s = self.wall_s or 1.0
        return {
            "generate": self.generate_s / wall_s,
            "execute": self.execute_s / wall_s,
            "verify": self.verify_s / wall_s,
            "train": self.train_s / wall_s,
            "idle": self.idle_s / wall_s,
        }


def split_time(
    wall_s: float,
    *,
    generate_s: float = 0.0,
    train_s: float = 0.0,
    execute_s: float = 0.0,
    verify_s: float = 0.0,
) -> TimeSplit:
    """Divide `wall_s`: first what the compute thread was busy with, then what it waited for.

    `generate_s` and `train_s` are busy seconds of the one compute thread and never overlap.
    `execute_s` and `verify_s` are active seconds summed over attempts, which run side by side and
    beneath the compute thread; together they get at most the time it was not busy, in proportion.

    Raises:
        UsageError: a duration is negative.

    >>> split_time(10, generate_s=4, train_s=2, execute_s=9, verify_s=3)
    TimeSplit(generate_s=4, execute_s=3.0, verify_s=1.0, train_s=2, idle_s=0.0)
    """
    parts = (wall_s, generate_s, train_s, execute_s, verify_s)
    if min(parts) < 0:
        raise UsageError(f"wanted durations of 0 s or more, got {parts}.")
    busy_s = generate_s + train_s
    if busy_s > wall_s:  # two clocks disagree by a little; the whole stays the wall time
        generate_s, train_s = generate_s * wall_s / busy_s, train_s * wall_s / busy_s
        busy_s = wall_s
    waited_s = wall_s - busy_s
    wanted_s = execute_s + verify_s
    scale = min(1.0, waited_s / wanted_s) if wanted_s else 0.0
    return TimeSplit(
        generate_s=generate_s,
        execute_s=execute_s * scale,
        verify_s=verify_s * scale,
        train_s=train_s,
        idle_s=max(0.0, waited_s - wanted_s * scale),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a run, or a part of one, used up."""

    time: TimeSplit
    sampled_tokens: int = 0
    trained_tokens: int = 0
    price_per_hour: float | None = None
    """In the person's currency; None: unknown, and no price is claimed."""

    @property
    def price(self) -> float | None:
        """Wall time at the price per hour; None where that is unknown."""
        if self.price_per_hour is None:
            return None
        return self.time.wall_s / 3600 * self.price_per_hour

    @property
    def sampled_tokens_per_s(self) -> float:
        """Sampled tokens over wall time; 0 where no time passed."""
        return self.sampled_tokens / self.time.wall_s if self.time.wall_s else 0.0
