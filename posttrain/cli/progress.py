"""What a run shows while it works: a live display on a terminal, one plain line elsewhere.

`Watch` takes in what the loop records and knows where the run stands; the two displays only read
it. The one thing that must stay true: recording never raises and never waits, whatever the loop
or the terminal does.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from posttrain.core.ports import Clock, Recorder
from posttrain.core.task import Json

WINDOW = 8
"""Steps over which rewards, speed and time left are averaged."""

HEARTBEAT_S = 15.0
"""Time between plain lines while nothing happens."""


class Display(AbstractContextManager["Display"], Recorder, Protocol):
    """A recorder that is shown while it is open."""


@dataclass(slots=True)
class DomainWatch:
    """What is known of one domain."""

    rewards: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Mean reward and number of attempts of the latest steps."""
    evaluated: dict[str, float] = field(default_factory=dict)
    """Pass rate by point."""

    @property
    def reward(self) -> float | None:
        """Mean over the window; None where nothing was rewarded yet."""
        return _mean(self.rewards)


class Watch:
    """Where a run stands, from what was recorded."""

    def __init__(self, clock: Clock, *, steps: Mapping[str, int], minutes: float | None) -> None:
        self._clock = clock
        self._steps = steps
        self._minutes = minutes
        self._started_s = clock.now_s()
        self._phase_started_s: dict[str, float] = {}
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.phase = "starting" if self.steps else "evaluating"
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.domains: dict[str, DomainWatch] = {}
        self.message = ""

    def take(self, kind: str, data: Mapping[str, Json]) -> None:
        """Take in one record."""
        self.step = int(data.get("step", self.step))
        match kind:
            case "step":
                self._take_step(data)
            case "eval":
                point, _, step = str(data.get("point", "")).partition("@")
                self.message = f"evaluated ({point}{f' step {step}' if step else ''})"
                for name, told in (data.get("domains") or {}).items():
                    passed = [r["passed"] for r in told["results"] if r["passed"] is not None]
                    if passed:
                        self._domain(name).evaluated[point] = sum(passed) / len(passed)
            case "phase":
                self._enter(str(data["phase"]), spent_s=data.get("spent_s", 0.0))
            case "heartbeat" | "notice" | "warning" | "ended":
                self.message = str(data.get("message", ""))
            case _:  # single attempts and the like: written down, not shown
                pass

    def _enter(self, phase: str, *, spent_s: float = 0.0) -> None:
        """A new phase: means over steps of the old one would say nothing about it. `spent_s` went
        into it before a resume.
        """
        if phase == self.phase:
            return
        self.phase = phase
        self._phase_started_s.setdefault(phase, self._clock.now_s() - spent_s)
        self._recent.clear()
        for domain in self.domains.values():
            domain.rewards.clear()

    def _take_step(self, data: Mapping[str, Json]) -> None:
        self._enter(str(data.get("phase", self.phase)))
        self.metrics = {k: v for k, v in (data.get("metrics") or {}).items() if v is not None}
        seconds = sum((data.get("seconds") or {}).values())
        self._recent.append((int(data.get("tokens") or 0), seconds))
        for name, told in (data.get("domains") or {}).items():
            watched = self._domain(name)
            if told.get("reward") is not None and self.phase != "sft":  # else an oracle earned it
                watched.rewards.append((told["reward"], int(told.get("n", 1))))
        self.message = ""

    def _domain(self, name: str) -> DomainWatch:
        return self.domains.setdefault(name, DomainWatch())

    @property
    def steps(self) -> int:
        """Steps of all phases together, at most."""
        return sum(self._steps.values())

    @property
    def place(self) -> str:
        """The step of all steps; '' where none is to be made."""
        return f"step {self.step}/{self.steps}" if self.steps else ""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock.now_s() - self._started_s

    @property
    def reward(self) -> float | None:
        """Mean reward over the window, all domains."""
        return _mean([pair for domain in self.domains.values() for pair in domain.rewards])

    @property
    def tokens_per_s(self) -> float | None:
        """Sampled tokens a second over the window; None before the first step."""
        seconds = sum(s for _, s in self._recent)
        return sum(tokens for tokens, _ in self._recent) / seconds if seconds > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds of this phase left: by steps at the recent pace, or by its time limit,
        whichever ends first; None where neither is known.
        """
        seconds = [s for _, s in self._recent]
        limits = []
        if seconds and self.phase in self._steps:
            left = max(0, self._last_step - self.step)
            limits.append(left * sum(seconds) / len(seconds))
        if self._minutes is not None and self.phase == "rl":
            spent = self._clock.now_s() - self._phase_started_s.get("rl", self._clock.now_s())
            limits.append(max(0.0, 60 * self._minutes - spent))
        return min(limits) if limits else None

    @property
    def _last_step(self) -> int:
        """The running number of the phase's last step."""
        phases = list(self._steps)
        return sum(self._steps[phase] for phase in phases[: phases.index(self.phase) + 1])

    def line(self) -> str:
        """The state in one plain line."""
        parts = [" ".join(filter(None, (clock_text(self.elapsed_s), self.phase, self.place)))]
        if self.reward is not None:
            parts.append(f"reward {self.reward:.3f}")
        if "loss" in self.metrics:
            parts.append(f"loss {self.metrics['loss']:.3g}")
        if self.tokens_per_s:
            parts.append(f"{self.tokens_per_s:.0f} tokens/s")
        if self.left_s is not None:
            parts.append(f"{clock_text(self.left_s)} left")
        if self.message:
            parts.append(self.message)
        return " · ".join(parts)


TOLD = frozenset({"phase", "step", "eval", "notice", "warning", "ended"})
"""Kinds of records that a plain line is written for at once."""


class Heartbeat:
    """A plain line for whatever happens, and one every `HEARTBEAT_S` seconds where nothing does."""

    def __init__(self, watch: Watch, clock: Clock, stream: TextIO) -> None:
        self._watch = watch
        self._clock = clock
        self._stream = stream
        self._told_s = -math.inf

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def record(self, kind: str, data: Mapping[str, Json]) -> None:
        """Take note; a line is written where something happened or time has passed."""
        self._watch.take(kind, data)
        now_s = self._clock.now_s()
        if kind not in TOLD and now_s - self._told_s < HEARTBEAT_S:
            return
        self._told_s = now_s
        try:
            print(self._watch.line(), file=self._stream, flush=True)
        except OSError:  # the reader went away; the run goes on
            self._told_s = math.inf


class LiveView(Live):
    """The live display."""

    def __init__(self, watch: Watch, console: Console) -> None:
        self._watch = watch
        super().__init__(
            get_renderable=self.render, console=console, refresh_per_second=4, transient=True
        )

    def record(self, kind: str, data: Mapping[str, Json]) -> None:
        """Take note; the display refreshes itself."""
        self._watch.take(kind, data)

    def render(self) -> RenderableType:
        """What is on the screen now."""
        return Group(self._head(), self._domains(), Text(self._watch.message, style="dim"))

    def _head(self) -> Table:
        watch = self._watch
        head = Table.grid(padding=(0, 3))
        bar = ProgressBar(total=max(1, watch.steps), completed=watch.step, width=30)
        left = clock_text(watch.left_s) if watch.left_s is not None else "–"
        reward = "–" if watch.reward is None else f"{watch.reward:.3f}"
        speed = "–" if watch.tokens_per_s is None else f"{watch.tokens_per_s:.0f}"
        head.add_row(
            Text(watch.phase.upper(), style="bold"),
            bar,
            watch.place,
            f"reward [bold]{reward}[/]",
            f"{speed} tokens/s",
            f"{clock_text(watch.elapsed_s)} gone, {left} left",
        )
        return head

    def _domains(self) -> Table:
        drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        points = [p for p in ("base", "sft", "rl") if self._evaluated(p)]
        drawn.add_column("domain", header_style="dim")
        drawn.add_column("reward", header_style="dim", justify="right")
        drawn.add_column("")
        for point in points:
            drawn.add_column(f"held-out {point}", header_style="dim", justify="right")
        for name, domain in list(self._watch.domains.items()):
            share = domain.reward
            drawn.add_row(
                Text(name),
                "–" if share is None else f"{share:.3f}",
                ProgressBar(total=1.0, completed=share or 0.0, width=16),
                *(_percent(domain.evaluated.get(point)) for point in points),
            )
        return drawn

    def _evaluated(self, point: str) -> bool:
        return any(point in domain.evaluated for domain in list(self._watch.domains.values()))


def display(watch: Watch, clock: Clock, console: Console | None = None) -> Display:
    """The live display on a terminal, plain lines elsewhere."""
    console = console or Console()
    if console.is_terminal:
        return cast("Display", LiveView(watch, console))
    return cast("Display", Heartbeat(watch, clock, sys.stdout))


def _mean(rewards: Collection[tuple[float, int]]) -> float | None:
    """Mean over all attempts; None where there was none."""
    count = sum(n for _, n in rewards)
    return sum(reward * n for reward, n in rewards) / count if count else None


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def clock_text(seconds: float) -> str:
    """A duration as a clock shows it.

    >>> clock_text(65), clock_text(3700)
    ('1:05', '1:01:40')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
