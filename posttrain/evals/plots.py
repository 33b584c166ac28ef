"""Geometry of the report's plots: data in, coordinates out; the template draws them.

No text is put into markup here, so nothing here can forget to escape it. The one thing that must
stay true: a value that is not finite is never drawn as a number and never lost: it becomes a
marked point and is counted (a diverged run must look diverged).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 360.0, 200.0
LEFT, RIGHT, TOP, BOTTOM = 40.0, 8.0, 20.0, 26.0
"""Margins of a chart, in the units of its view box; names of bands stand in the upper one."""

_LARGEST = 1e100
"""Larger finite values are drawn here, so that sums of them stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured value."""

    x: float
    value: float
    weight: float = 1.0
    """How much it counts in the smoothed line (number of attempts behind it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A grid line and its label."""

    place: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point with its tooltip."""

    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A span of the x axis that belongs together, such as a phase."""

    name: str
    first: float
    last: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """A band in the coordinates of a chart."""

    name: str
    x: float
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One small chart: dots are single values, the line their moving mean."""

    title: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    dots: tuple[Mark, ...]
    lines: tuple[str, ...]
    """`points` of polylines; a gap stands where values were not finite."""
    broken: tuple[Mark, ...]
    """Values that are not finite, at the upper edge."""
    strips: tuple[Strip, ...] = ()
    last: str = ""
    """The moving mean's last value, as text; '' where there is none."""

    @property
    def warning(self) -> str:
        """What a reader must know about values that are not finite; '' if all are."""
        if not self.broken:
            return ""
        many = "1 point is" if len(self.broken) == 1 else f"{len(self.broken)} points are"
        return f"{many} not finite" + ("" if self.dots else "; no finite value exists")


def chart(
    title: str,
    samples: Sequence[Sample],
    *,
    bands: Sequence[Band] = (),
    span: tuple[float, float] | None = None,
    window: float = 1 / 10,
) -> Chart:
    """The chart of a series over training steps.

    Args:
        title: what is shown, with its unit.
        samples: in ascending x; values may be NaN or infinite.
        bands: phases shaded behind the curve.
        span: range of the y axis; None: from the finite values.
        window: width of the moving mean (weighted, centred), as a share of the x axis.
    """
    finite = [sample for sample in samples if math.isfinite(sample.value)]
    xs = [sample.x for sample in samples] + [x for band in bands for x in (band.first, band.last)]
    x_axis = Axis.over(xs, LEFT, WIDTH - RIGHT, whole=True)
    values = list(span) if span else [sample.value for sample in finite]
    y_axis = Axis.over(values, HEIGHT - BOTTOM, TOP, exact=span is not None)
    half = window * (x_axis.high - x_axis.low) / 2
    runs = [_smooth(run, half) for run in _runs(samples)]
    smooth = [pair for run in runs for pair in run]
    return Chart(
        title=title,
        x_ticks=x_axis.ticks(5),
        y_ticks=y_axis.ticks(5),
        dots=tuple(_mark(sample, x_axis, y_axis) for sample in finite),
        lines=tuple(_points(run, x_axis, y_axis) for run in runs),
        broken=tuple(
            Mark(x=x_axis.at(s.x), y=TOP, title=f"step {s.x:g}: {number(s.value)}")
            for s in samples
            if not math.isfinite(s.value)
        ),
        strips=tuple(_strip(band, x_axis) for band in bands),
        last=number(smooth[-1][1]) if smooth else "",
    )


def _mark(sample: Sample, x_axis: Axis, y_axis: Axis) -> Mark:
    return Mark(
        x=x_axis.at(sample.x),
        y=y_axis.at(sample.value),
        title=f"step {sample.x:g}: {number(sample.value)}",
    )


def _points(run: Sequence[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> str:
    return " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in run)


def _strip(band: Band, x_axis: Axis) -> Strip:
    start, end = x_axis.at(band.first - 0.5), x_axis.at(band.last + 0.5)
    return Strip(name=band.name, x=start, width=end - start)


def _runs(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Stretches of finite values between values that are not."""
    runs: list[list[Sample]] = [[]]
    for sample in samples:
        if math.isfinite(sample.value):
            runs[-1].append(sample)
        else:
            runs.append([])
    return [run for run in runs if run]


def _smooth(run: Sequence[Sample], half: float) -> list[tuple[float, float]]:
    """Moving mean over the samples at most `half` away in x, weighted."""
    means, xs = [], [sample.x for sample in run]
    for sample in run:
        near = run[bisect.bisect_left(xs, sample.x - half) : bisect.bisect(xs, sample.x + half)]
        weight = math.fsum(item.weight for item in near)
        total = math.fsum(item.weight * max(-_LARGEST, min(_LARGEST, item.value)) for item in near)
        means.append((sample.x, total / weight if weight > 0 else sample.value))
    return means


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A linear map from values to coordinates."""

    low: float
    high: float
    start: float
    end: float
    whole: bool = False
    """Ticks at whole numbers only."""

    @staticmethod
    def over(
        values: Sequence[float],
        start: float,
        end: float,
        *,
        whole: bool = False,
        exact: bool = False,
    ) -> Axis:
        """The axis that holds all values, with a little air unless `exact`."""
        held = [max(-_LARGEST, min(_LARGEST, value)) for value in values]
        low, high = min(held, default=0.0), max(held, default=1.0)
        if high - low <= max(1 / _LARGEST, 1e-9 * abs(high)):
            air = 0.5 if abs(low) < 1e-6 else abs(low) / 10
        else:
            air = 0.5 if whole else 0.0 if exact else (high - low) * 0.06
        return Axis(low=low - air, high=high + air, start=start, end=end, whole=whole)

    def at(self, value: float) -> float:
        """Coordinate of a value; beyond the largest drawable one, that of the edge."""
        value = max(-_LARGEST, min(_LARGEST, value))
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, most: int) -> tuple[Tick, ...]:
        """At most about `most` round values inside the axis.

        >>> axis = Axis(low=0.0, high=1.0, start=0.0, end=100.0)
        >>> [tick.label for tick in axis.ticks(4)]
        ['0', '0.5', '1']
        """
        step = _round_step((self.high - self.low) / most)
        step = max(1.0, step) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        values = (index * step for index in range(first, last + 1))
        return tuple(Tick(place=self.at(value), label=number(value)) for value in values)


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5 × 10ⁿ at or above `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def number(value: float) -> str:
    """A number for people, with three significant digits; never `-0`.

    >>> number(0.12345), number(12345.6), number(float("nan")), number(3.0)
    ('0.123', '12,346', 'NaN', '3')
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
