"""Plots: coordinates, and values that are not finite (BR-68)."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from posttrain.evals import plots
from posttrain.evals.plots import Band, Sample, chart


def series(*values: float) -> list[Sample]:
    return [Sample(x=x, value=value) for x, value in enumerate(values)]


def test_points_that_are_not_finite_are_marked_and_counted_and_the_rest_is_drawn() -> None:
    """BR-68: such points vanished, so that a diverged run looked healthy."""
    drawn = chart("loss", series(1.0, math.nan, math.inf, 2.0, -math.inf))
    assert [dot.title for dot in drawn.dots] == ["step 0: 1", "step 3: 2"]
    assert [mark.title for mark in drawn.broken] == ["step 1: NaN", "step 2: ∞", "step 4: −∞"]
    assert drawn.warning == "3 points are not finite"
    assert len(drawn.lines) == 2  # no line is drawn across the gap


def test_a_metric_that_is_never_finite_is_listed_with_a_warning() -> None:
    drawn = chart("loss", series(math.nan, math.nan))
    assert drawn.dots == ()
    assert drawn.warning == "2 points are not finite; no finite value exists"


def test_the_line_is_the_weighted_moving_mean() -> None:
    samples = [Sample(x=0, value=0.0, weight=3), Sample(x=1, value=1.0, weight=1)]
    assert chart("reward", samples, window=2.0).last == "0.25"


def test_far_samples_are_not_averaged_with_one_another() -> None:
    samples = [Sample(x=1, value=5.0), Sample(x=2, value=5.0), Sample(x=100, value=1.0)]
    assert chart("loss", samples).last == "1"


def test_bands_meet_between_their_steps_and_hold_their_dots() -> None:
    """There was a gap between two phases, and the first and last dots lay on the edge."""
    bands = [Band(name="SFT", first=1, last=2), Band(name="RL", first=3, last=6)]
    drawn = chart("loss", [Sample(x=1, value=1.0), Sample(x=6, value=0.5)], bands=bands)
    sft, rl = drawn.strips
    assert sft.x == plots.LEFT
    assert math.isclose(sft.x + sft.width, rl.x)
    assert math.isclose(rl.x + rl.width, plots.WIDTH - plots.RIGHT)
    assert plots.LEFT < drawn.dots[0].x < drawn.dots[1].x < plots.WIDTH - plots.RIGHT
    assert [tick.label for tick in drawn.x_ticks] == ["2", "4", "6"]


@given(st.lists(st.floats(allow_subnormal=False, min_value=-1e12, max_value=1e12), max_size=20))
def test_every_coordinate_lies_inside_the_chart(values: list[float]) -> None:
    drawn = chart("any", series(*values))
    assert len(drawn.dots) == len(values)
    for mark in drawn.dots:
        assert plots.LEFT - 0.01 <= mark.x <= plots.WIDTH - plots.RIGHT + 0.01
        assert plots.TOP - 0.01 <= mark.y <= plots.HEIGHT - plots.BOTTOM + 0.01


@given(st.lists(st.floats(), max_size=20))
def test_any_values_can_be_drawn(values: list[float]) -> None:
    drawn = chart("any", series(*values))
    assert len(drawn.dots) + len(drawn.broken) == len(values)
