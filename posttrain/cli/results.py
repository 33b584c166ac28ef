"""The end of a run for whoever reads: the table, domain by domain, and the page of the report."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrain.core.errors import PreflightError
from posttrain.evals import report
from posttrain.evals.metrics import Score
from posttrain.evals.report import ReportData
from posttrain.evals.report_text import p_text, percent
from posttrain.evals.summary import DIRECTION_NAMES, POINT_NAMES, Change, Direction, Outcomes

STYLES = {Direction.IMPROVED: "bold green", Direction.FELL: "bold red"}

PLAIN_WIDTH = 110
"""Columns where the output is no terminal."""


def tell(folder: Path) -> None:
    """Print the table of a run, write its report, and say where that is.

    Raises:
        UsageError: the folder holds no run.
        PreflightError: the report cannot be written.
    """
    show(report.load(folder))
    try:
        page = report.write(folder)
    except OSError as error:
        raise PreflightError(
            f"the report of {folder} cannot be written: {error.strerror or error}.",
            f"free space or permissions there, then posttrain report {folder.name}",
        ) from error
    typer.echo(f"report: {page}")


def show(data: ReportData, console: Console | None = None) -> None:
    """Print the table, the verdict in one sentence, and what the run warned of."""
    console, outcomes = console or Console(), data.outcomes
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    if outcomes.changes or data.quarantined:
        console.print(table(outcomes, data.quarantined))
    if outcomes.rl_gain is not None:
        gain = f"{100 * outcomes.rl_gain:+.1f} points, paired p {p_text(outcomes.rl_gain_p)}"
        console.print(f"RL over what it started from (mean over trained domains): {gain}.")
    console.print(Text(outcomes.sentence, style="bold"), soft_wrap=True)
    for warning in data.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)


def table(outcomes: Outcomes, quarantined: Collection[str] = ()) -> Table:
    """One row a domain: each point with its 95 % interval, n, best constant and paired p; those in
    quarantine too, whether they could be evaluated or not.
    """
    drawn = Table(
        title="Held-out tasks: share passed, 95 % interval", title_justify="left", box=SIMPLE_HEAD
    )
    drawn.add_column("domain", overflow="fold")
    drawn.add_column("n", justify="right")
    for point in outcomes.points:
        drawn.add_column(POINT_NAMES[point], justify="right", no_wrap=True)
    drawn.add_column("constant", justify="right", no_wrap=True)
    drawn.add_column("paired p", justify="right", no_wrap=True)
    drawn.add_column("", no_wrap=True)
    for change in outcomes.changes:
        drawn.add_row(*_cells(change, outcomes.points, out=change.domain in quarantined))
    known = {change.domain for change in outcomes.changes}
    for domain in quarantined:
        if domain not in known:
            drawn.add_row(_name(domain, "quarantined"))
    return drawn


def _name(domain: str, *words: str) -> Text:
    marked = f" ({', '.join(words)})" if words else ""
    return Text.assemble(domain, (marked, "dim"))


def _cells(change: Change, points: tuple[str, ...], *, out: bool) -> list[Text | str]:
    words = [word for word, holds in (("watched", change.watch), ("quarantined", out)) if holds]
    return [
        _name(change.domain, *words),
        str(change.last.scored),
        *(_score(change.scores.get(point)) for point in points),
        percent(change.constant.rate) if change.constant else "–",
        p_text(change.comparison.p if change.comparison else None),
        Text(DIRECTION_NAMES[change.direction], style=STYLES.get(change.direction, "")),
    ]


def _score(score: Score | None) -> Text | str:
    if score is None or score.rate is None:
        return "–"
    low, high = 100 * score.interval.low, 100 * score.interval.high
    return Text.assemble(percent(score.rate), (f"\n{low:.0f} – {high:.0f}", "dim"))
