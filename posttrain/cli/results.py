"""The end of a run for whoever reads: the table, domain by domain, and the page of the report."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrain.core.errors import PreflightError
from posttrain.evals import report
from posttrain.evals.metrics import Score
from posttrain.evals.report_text import p_text, percent
from posttrain.evals.summary import POINT_NAMES, Change, Direction, Outcomes

STYLES = {Direction.IMPROVED: "bold green", Direction.FELL: "bold red"}


MARKS = {Direction.IMPROVED: "▲ ", Direction.FELL: "▼ "}
PLAIN_WIDTH = 110
"""Columns where the output is no terminal."""


def tell(folder: Path) -> None:
    """Print the table of a run, write its report, and say where that is.

    Raises:
        UsageError: the folder holds no run.
        PreflightError: the report cannot be written.
    """
    show(report.load(folder).outcomes)
    try:
        page = report.write(folder)
    except OSError as error:
        raise PreflightError(
            f"the report of {folder} cannot be written: {error.strerror or error}.",
            f"free space or permissions there, then posttrain report {folder.name}",
        ) from error
    typer.echo(f"report: {page}")


def show(outcomes: Outcomes, console: Console | None = None) -> None:
    """Print the table and the verdict in one sentence."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    if outcomes.changes:
        console.print(table(outcomes))
    if outcomes.rl_gain is not None:
        gain = f"{100 * outcomes.rl_gain:+.1f} points, paired p {p_text(outcomes.rl_gain_p)}"
        console.print(f"RL over what it started from (mean over trained domains): {gain}.")
    console.print(Text(outcomes.sentence, style="bold"), soft_wrap=True)


def table(outcomes: Outcomes) -> Table:
    """One row a domain: each point with its 95 % interval, n, best constant and paired p."""
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
        drawn.add_row(*_cells(change, outcomes.points))
    return drawn


def _cells(change: Change, points: tuple[str, ...]) -> list[Text | str]:
    name = Text(change.domain)
    if change.watch:
        name.append(" (watched)", style="dim")
    word = MARKS.get(change.direction, "") + change.direction.replace("_", " ")
    if change.direction is Direction.UNKNOWN:
        word = "–"
    return [
        name,
        str(change.last.scored),
        *(_score(change.scores.get(point)) for point in points),
        percent(change.constant.rate) if change.constant else "–",
        p_text(change.comparison.p if change.comparison else None),
        Text(word, style=STYLES.get(change.direction, "")),
    ]


def _score(score: Score | None) -> Text | str:
    if score is None or score.rate is None:
        return "–"
    low, high = 100 * score.interval.low, 100 * score.interval.high
    return Text.assemble(percent(score.rate), (f"\n{low:.0f} – {high:.0f}", "dim"))
