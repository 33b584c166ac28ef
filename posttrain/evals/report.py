"""The report of a run: one self-contained HTML file, rebuilt at any time from the run's folder.

It reads the ledger, the journal and the saved configuration; it measures nothing itself. The file
needs no network and holds no script. The one thing that must stay true: everything a policy, a
task or a tool wrote is shown literally, never as markup (templates escape all they print).
"""

from __future__ import annotations

import math
import re
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from posttrain.core import codec, events
from posttrain.core.errors import UsageError
from posttrain.core.events import Note
from posttrain.core.trajectory import Trajectory
from posttrain.evals import plots, report_text, summary
from posttrain.evals.plots import Band, Chart, Sample
from posttrain.evals.summary import Outcomes, Reading, Step
from posttrain.observe.blobs import write_whole
from posttrain.observe.cost import Cost, TimeSplit
from posttrain.observe.journal import read_notes
from posttrain.observe.ledger import read_events
from posttrain.schedule import account
from posttrain.schedule.staleness import Lineage

MAX_PAIRS = 8
"""Tasks whose attempts are shown before and after, spread over the domains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two attempts at one task."""

    before: Trajectory
    after: Trajectory

    @property
    def changed(self) -> bool:
        """Whether the reward differs."""
        return self.before.reward != self.after.reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What became of the attempts, from the ledger."""

    entered: int = 0
    trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number by cause (`_cause`)."""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    stops: Mapping[str, int] = field(default_factory=dict)
    drawn: frozenset[str] = frozenset()
    """Domains that tasks were drawn from."""
    resumed: int = 0
    ended: str = ""
    """Reason of the last end; '' while the run goes on or after it was killed."""

    @property
    def pending(self) -> int:
        """Attempts that were neither trained nor dropped."""
        return self.entered - self.trained - sum(self.dropped.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Everything the report shows."""

    run: str
    config_text: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    outcomes: Outcomes = field(default_factory=Outcomes)
    pairs: tuple[Pair, ...] = ()
    account: Account = field(default_factory=Account)
    cost: Cost = field(default_factory=lambda: Cost(time=TimeSplit()))
    environment: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """Each once, in order."""
    quarantined: tuple[str, ...] = ()
    """Domains; the evidence is among the warnings."""


def write(folder: Path) -> Path:
    """Rebuild `report/index.html` of a run folder; the file is replaced in one move.

    Raises:
        UsageError: the folder holds no run.
    """
    target = folder / "report" / "index.html"
    page = render(load(folder))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, page.encode())
    target.chmod(0o644)
    return target


def load(folder: Path) -> ReportData:
    """What a run folder holds.

    Raises:
        UsageError: the folder holds no run.
    """
    ledger, journal = folder / "ledger.jsonl", folder / "journal"
    if not ledger.exists() and not journal.exists():
        raise UsageError(
            f"{folder} holds no run: neither ledger.jsonl nor journal/ is there.",
            "give the name of a folder under runs/.",
        )
    notes: dict[str, list[Note]] = {}
    attempts: dict[str, _Shown] = {}
    for note in read_notes(journal):
        if note.kind == "trajectory":
            _keep_shown(attempts, note)
        else:
            notes.setdefault(note.kind, []).append(note)
    config_file = folder / "config.toml"
    config_text = config_file.read_text(encoding="utf-8") if config_file.exists() else ""
    config = tomllib.loads(config_text)
    history = list(read_events(ledger)) if ledger.exists() else []
    totals = account_of(history)
    evaluations = surviving(notes.get("eval", ()), history)
    watched = _watched(evaluations, totals)
    steps = summary.steps_of(notes.get("step", ()))
    outcomes = summary.outcomes_of(evaluations, watch=watched)
    return ReportData(
        run=config.get("run", {}).get("name") or folder.name,
        config_text=config_text,
        config=config,
        steps=steps,
        outcomes=outcomes,
        pairs=_pairs(attempts, outcomes),
        account=totals,
        cost=_cost(steps, config.get("run", {}).get("price_per_hour")),
        environment=_environment(notes.get("environment", ())),
        warnings=(*_told(notes.get("warning", ()), "message"), *map(_other, outcomes.other_suites)),
        quarantined=_told(notes.get("quarantine", ()), "domain"),
    )


def _other(point: str) -> str:
    name = summary.POINT_NAMES[point]
    how = "was made on other tasks, or under other checks, than the newest one"
    return f"The evaluation '{name}' {how}, and is compared with nothing."


def surviving(evaluations: Iterable[Note], ledger: Iterable[events.LedgerEvent]) -> list[Note]:
    """The evaluations of weights that no resume or rollback left behind."""
    lineage = Lineage()
    for event in ledger:
        match event:
            case events.Published():
                lineage.publish(event.version, parent=event.parent)
            case events.Rewound():
                lineage.rewind(event.version)
            case _:
                pass
    return [note for note in evaluations if lineage.age(note.data.get("version", 0)) is not None]


def account_of(ledger: Iterable[events.LedgerEvent]) -> Account:
    """Totals of a ledger."""
    folded = account.Account()
    drawn: dict[int, str] = {}
    resumed, ended = 0, ""
    for event in ledger:
        folded.apply(event)
        match event:
            case events.Started():
                resumed, ended = resumed + event.resumed, ""
            case events.Drawn():
                drawn[event.draw] = event.domain
            case events.Ended():
                ended = event.reason
            case _:
                pass
    attempts, dropped = folded.attempts(), account.Status.DROPPED
    ends = [attempt.finished for attempt in attempts if attempt.finished]
    causes = [_cause(a.reason, drawn.get(a.draw, "")) for a in attempts if a.status is dropped]
    return Account(
        entered=len(attempts),
        trained=folded.stats().trained,
        dropped=dict(Counter(causes).most_common()),
        outcomes=dict(Counter(end.outcome for end in ends).most_common()),
        stops=dict(Counter(end.stop for end in ends).most_common()),
        drawn=frozenset(drawn.values()),
        resumed=resumed,
        ended=ended,
    )


def _cause(reason: str, domain: str) -> str:
    """Why an attempt was dropped, without what is its own: kind, domain and exception.

    >>> _cause("domain_error: domain 'own.sums' raised KeyError: 'x7'", "own.sums")
    'domain error: own.sums, KeyError'
    >>> _cause("phase_over", "own.sums")
    'phase over'
    """
    kind, _, message = reason.partition(": ")
    kind = kind.replace("_", " ")
    if not message:
        return kind
    named = re.findall(r"raised (\w+)|\b(\w+(?:Error|Exception))\b", message)
    exceptions = [raised or other for raised, other in named]
    return ", ".join([f"{kind}: {domain}", *exceptions[-1:]])


def _watched(evaluations: Iterable[Note], totals: Account) -> frozenset[str]:
    """Evaluated domains that were named for watching, and that no task was ever drawn from."""
    told = [pair for note in evaluations for pair in note.data["domains"].items()]
    return frozenset(name for name, each in told if each.get("watch")) - totals.drawn


# --- trajectories -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Shown:
    """The earliest and the latest evaluation attempt at one task, as the journal holds them."""

    first: Mapping[str, Any]
    last: Mapping[str, Any]


_MOVES: Mapping[tuple[bool | None, bool | None], str] = {
    (False, True): "gained",
    (True, False): "lost",
}


def _pairs(shown: Mapping[str, _Shown], outcomes: Outcomes) -> tuple[Pair, ...]:
    """A few tasks with both attempts: what was gained, domain by domain, and what was lost."""
    ready = {task: both for task, both in shown.items() if both.first is not both.last}
    evaluations = list(outcomes.evaluations.values())
    moved: dict[str, dict[str, list[str]]] = {}
    if len(evaluations) > 1:
        before = {result.task: result.passed for result in evaluations[0].results}
        for result in evaluations[-1].results:
            if result.task in ready:
                kind = _MOVES.get((before.get(result.task), result.passed), "same")
                moved.setdefault(result.domain, {}).setdefault(kind, []).append(result.task)
    chosen = [
        (tasks.get("gained") or tasks.get("same") or tasks["lost"])[0] for tasks in moved.values()
    ]
    lost = [task for tasks in moved.values() for task in tasks.get("lost", ())][:1]
    tasks = dict.fromkeys(chosen[: MAX_PAIRS - len(lost)] + lost)
    if not tasks:
        tasks = dict.fromkeys(list(ready)[:MAX_PAIRS])
    return tuple(
        Pair(before=_trajectory(ready[task].first), after=_trajectory(ready[task].last))
        for task in tasks
    )


def _keep_shown(shown: dict[str, _Shown], note: Note) -> None:
    """Remember an evaluation attempt, without its token rows (they are long and not shown)."""
    data = {key: value for key, value in note.data.items() if key != "rows"}
    if data.get("lane") == "eval":
        task = data["task"]
        name = f"{task['domain']}/{task['level']}/{task['seed']}"
        if name in shown:
            shown[name].last = data
        else:
            shown[name] = _Shown(data, data)


def _trajectory(data: Mapping[str, Any]) -> Trajectory:
    return codec.from_json(Trajectory, data)


# --- what the page shows ----------------------------------------------------------------------


def render(data: ReportData) -> str:
    """The page as one HTML text."""
    loader = jinja2.PackageLoader("posttrain.evals", "templates")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        percent=report_text.percent,
        change=report_text.change,
        duration=report_text.duration,
        p=report_text.p_text,
        breakable=report_text.breakable,
        number=plots.number,
    )
    environment.globals["plots"] = plots
    return environment.get_template("report.html.j2").render(
        data=data,
        names=summary.POINT_NAMES,
        directions=summary.DIRECTION_NAMES,
        overall=_overall(data.steps),
        by_domain=_by_domain(data.steps),
        heldout=_heldout(data.outcomes.course, data.steps),
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def _bands(steps: Sequence[Step]) -> list[Band]:
    spans: dict[str, list[int]] = {}
    for step in steps:
        spans.setdefault(step.phase, []).append(step.x)
    return [Band(name=n.upper(), first=xs[0], last=xs[-1]) for n, xs in spans.items()]


def _overall(steps: Sequence[Step]) -> list[Chart]:
    """Reward, throughput and every metric of the trainer over all steps."""
    bands = _bands(steps)
    reward = [
        Sample(x=s.x, value=s.reward, weight=sum(s.counts.values()))
        for s in steps
        if s.sampled and s.reward is not None
    ]
    speed = [
        Sample(x=s.x, value=s.tokens / sum(s.seconds.values()))
        for s in steps
        if s.sampled and s.tokens and sum(s.seconds.values()) > 0
    ]
    charts = [plots.chart("mean reward, all domains", reward, bands=bands)] if reward else []
    charts += [plots.chart("sampled tokens per second", speed, bands=bands)] if speed else []
    for name in dict.fromkeys(name for step in steps for name in step.metrics):
        samples = [Sample(x=s.x, value=s.metrics[name]) for s in steps if name in s.metrics]
        charts.append(plots.chart(name.replace("_", " "), samples, bands=bands))
    return charts


def _by_domain(steps: Sequence[Step]) -> list[Chart]:
    """Mean training reward of each domain over the steps."""
    bands = _bands(steps)
    own = [step for step in steps if step.sampled]
    names = sorted({name for step in own for name in step.rewards})
    charts = []
    for name in names:
        samples = [
            Sample(x=s.x, value=s.rewards[name], weight=s.counts.get(name, 1))
            for s in own
            if name in s.rewards
        ]
        charts.append(plots.chart(name, samples, bands=bands, span=(0.0, 1.0)))
    return charts


def _heldout(course: Sequence[Reading], steps: Sequence[Step]) -> list[Chart]:
    """Pass rate of each domain on its held-out tasks, one evaluation after the other."""
    names = dict.fromkeys(name for reading in course for name in reading.rates)
    charts = []
    for name in names if len(course) > 1 else ():
        samples = [Sample(x=r.step, value=r.rates[name]) for r in course if name in r.rates]
        charts.append(plots.chart(name, samples, bands=_bands(steps), span=(0.0, 1.0), window=0.0))
    return charts


def _cost(steps: Sequence[Step], price_per_hour: float | None) -> Cost:
    totals = {
        use: math.fsum(max(0.0, step.seconds.get(use, 0.0)) for step in steps)
        for use in ("generate", "execute", "verify", "train", "idle")
    }
    split = TimeSplit(**{f"{use}_s": seconds for use, seconds in totals.items()})
    tokens = sum(step.tokens for step in steps if step.sampled)
    return Cost(time=split, sampled_tokens=tokens, price_per_hour=price_per_hour)


def _told(notes: Iterable[Note], name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(note.data.get(name, "")) for note in notes))


def _environment(notes: Sequence[Note]) -> dict[str, str]:
    return {key: str(value) for note in notes[-1:] for key, value in note.data.items()}
