"""Progress: what a run shows on a terminal and elsewhere, by a manual clock."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from posttrain.cli import progress
from posttrain.cli.progress import Heartbeat, LiveView, Watch
from posttrain.core.clock import ManualClock


def step(number: int, phase: str = "rl", **rewards: float | None) -> dict[str, Any]:
    return {
        "phase": phase,
        "step": number,
        "metrics": {"loss": 0.5},
        "domains": {name: {"reward": reward, "n": 4} for name, reward in rewards.items()},
        "seconds": {"generate": 3.0, "train": 1.0},
        "tokens": 400,
    }


def evaluation(point: str, **marks: str) -> dict[str, Any]:
    domains = {
        name: {"results": [{"task": str(i), "passed": m == "1"} for i, m in enumerate(text)]}
        for name, text in marks.items()
    }
    return {"point": point, "domains": domains}


def watch(clock: ManualClock, *, minutes: float | None = None) -> Watch:
    return Watch(clock, steps={"sft": 2, "rl": 10}, minutes=minutes)


def test_the_line_says_step_reward_speed_and_time_left() -> None:
    clock = ManualClock()
    shown = watch(clock)
    shown.take("step", step(3, gcd=0.25, lcm=None))
    clock.advance(65)
    shown.take("step", step(4, gcd=0.75))
    assert shown.line() == (
        "1:05 rl step 4/12 · reward 0.500 · loss 0.5 · 100 tokens/s · 0:32 left"
    )


def test_a_run_that_goes_on_counts_what_was_done_before() -> None:
    """After a resume it stood at step 0, with all steps and all the time of the phase left."""
    clock = ManualClock()
    shown = watch(clock, minutes=2)
    shown.take("notice", {"message": "going on after step 9", "step": 9})
    assert shown.line() == "0:00 starting step 9/12 · going on after step 9"
    shown.take("phase", {"phase": "rl", "step": 9, "spent_s": 50.0})
    assert shown.left_s == 70.0
    shown.take("step", step(10))
    assert shown.left_s == 2 * 4.0


def test_a_time_limit_ends_the_phase_earlier_than_its_steps() -> None:
    clock = ManualClock()
    shown = watch(clock, minutes=0.5)
    shown.take("phase", {"phase": "rl"})
    clock.advance(10)
    shown.take("step", step(1))
    assert shown.left_s == 20.0


def test_before_the_first_step_nothing_is_claimed() -> None:
    shown = watch(ManualClock())
    assert (shown.reward, shown.tokens_per_s, shown.left_s) == (None, None, None)
    assert shown.line() == "0:00 starting step 0/12"


def test_rewards_of_oracles_are_not_told_as_the_policys() -> None:
    shown = watch(ManualClock())
    shown.take("step", step(1, phase="sft", gcd=1.0))
    assert shown.line() == "0:00 sft step 1/12 · loss 0.5 · 100 tokens/s · 0:04 left"
    assert list(shown.domains) == ["gcd"]
    shown.take("step", step(3, gcd=0.25))
    assert shown.reward == 0.25


def test_an_evaluation_alone_counts_no_steps() -> None:
    shown = Watch(ManualClock(), steps={}, minutes=None)
    shown.take("heartbeat", {"message": "evaluated 1 of 96 held-out tasks"})
    assert shown.line() == "0:00 evaluating · evaluated 1 of 96 held-out tasks"


def test_plain_lines_tell_events_at_once_and_heartbeats_now_and_then() -> None:
    clock, out = ManualClock(), io.StringIO()
    beat = Heartbeat(watch(clock), clock, out)
    beat.record("step", step(1, gcd=0.5))
    for number in range(10):
        clock.advance(4)
        beat.record("heartbeat", {"message": f"{number} attempts"})
        beat.record("trajectory", {"key": "x"})
    beat.record("warning", {"message": "domain gcd is quarantined"})
    beat.record("notice", {"message": "finishing the step"})
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + 2 + 2
    assert lines[1].endswith("3 attempts")
    assert lines[-2].endswith("domain gcd is quarantined")
    assert lines[-1].endswith("finishing the step")


def test_a_reader_that_goes_away_does_not_stop_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    clock = ManualClock()
    beat = Heartbeat(watch(clock), clock, Gone())
    beat.record("step", step(1))
    beat.record("step", step(2))


def test_the_live_view_shows_every_domain_with_its_held_out_rates() -> None:
    clock = ManualClock()
    console = Console(file=io.StringIO(), width=140, force_terminal=True, color_system=None)
    view = LiveView(watch(clock), console)
    view.record("eval", evaluation("base", gcd="0011"))
    view.record("step", step(3, gcd=0.5, **{"[bold]odd": 0.25}))
    view.record("heartbeat", {"message": "12 attempts since the last step"})
    console.print(view.render())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("RL", "step 3/12", "gcd", "0.500", "held-out base", "50.0 %", "12 attempts"):
        assert part in shown
    assert "[bold]odd" in shown


@pytest.mark.parametrize(("terminal", "kind"), [(True, LiveView), (False, Heartbeat)])
def test_the_display_fits_where_it_is_shown(terminal: bool, kind: type) -> None:
    clock = ManualClock()
    console = Console(file=io.StringIO(), force_terminal=terminal)
    assert isinstance(progress.display(watch(clock), clock, console), kind)
