"""`posttrain domains`: what can be practised, what one task looks like, and whether it is sound."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli import sources
from posttrain.core.errors import RunError, UsageError

if TYPE_CHECKING:
    from posttrain.cli.example import Example
    from posttrain.evals.admission import Admission

app = typer.Typer(help="Task domains.", no_args_is_help=True, rich_markup_mode=None)

SAMPLE = (
    "reasoning_gym.basic_arithmetic",
    "reasoning_gym.gcd",
    "reasoning_gym.letter_counting",
    "reasoning_gym.knights_knaves",
    "reasoning_gym.sudoku",
    "terminal.*",
)
"""What `check --sample` examines: quick, and one of each kind of checking."""


@app.command("ls")
def ls(
    pattern: Annotated[str, typer.Argument(help="Such as terminal.*")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the domains of the catalogue."""
    from posttrain.domains import catalogue

    entries = catalogue.matching(pattern)
    if as_json:
        listed = [{"name": e.name, "levels": e.levels, "source": e.source} for e in entries]
        typer.echo(json.dumps(listed, indent=2))
        return
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        levels = "levels ?" if entry.levels is None else f"levels 0–{entry.levels - 1}"
        typer.echo(f"{entry.name:{width}}  {levels:12}  {entry.source}")
    typer.echo(f"{len(entries)} domains")


@app.command("show", short_help="Show one task of a domain and its solution.")
def show(
    name: Annotated[str, typer.Argument(help="A domain.")],
    level: Annotated[int, typer.Option(help="Level of difficulty, 0 is the easiest.")] = 0,
    draw: Annotated[int, typer.Option(help="Which task.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The whole task as JSON.")] = False,
) -> None:
    """Show one task of a domain, as the policy reads it, with its reference solution."""
    import asyncio

    from posttrain.cli import example
    from posttrain.core import codec

    made = asyncio.run(example.make(name, level=level, draw=draw))
    if as_json:
        told = {"task": codec.to_json(made.task), "oracle": codec.to_json(made.oracle)}
        typer.echo(json.dumps(told, indent=2))
    else:
        _print(made)


def _print(example: Example) -> None:
    task = example.task
    described = task.description
    typer.secho(f"{task.id}  (levels 0–{example.levels - 1}, executor {task.executor})", bold=True)
    typer.echo(f"\nObjective\n{described.objective}")
    if described.constraints:
        typer.echo("\nConstraints")
        for constraint in described.constraints:
            typer.echo(f"- {constraint}")
    if described.verification:
        typer.echo(f"\nVerification\n{described.verification}")
    for tool in described.tools:
        typer.echo(f"\nTool {tool.name}: {tool.description}")
    typer.echo("\nChecks (private)")
    for check in task.checks:
        typer.echo(f"- {check.kind}@{check.version}{' (gate)' if check.gate else ''}")
    typer.echo("\nReference solution (private)")
    for turn in example.oracle.turns:
        for call in turn.tool_calls:
            typer.echo(f"→ {call.name} {json.dumps(call.arguments, ensure_ascii=False)}")
        if turn.text:
            typer.echo(turn.text)


@app.command("check", short_help="Check that domains may be trained on.")
def check(
    names: Annotated[
        list[str] | None, typer.Argument(help="Domains, patterns or files.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every domain.")] = False,
    sample: Annotated[bool, typer.Option("--sample", help="A fixed quick sample.")] = False,
    per_level: Annotated[int, typer.Option(min=1, help="Tasks of each level.")] = 4,
    fixtures: Annotated[
        Path | None, typer.Option(help="Folder of attacks that somebody caught, as JSON.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with the judge and the sandboxes of a run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON lines.")] = False,
) -> None:
    """Check domains: the oracle earns 1, attacks earn 0, nothing private is shown, tasks repeat.
    Reports are kept under runs/admissions, where `posttrain train` looks for them.
    """
    import asyncio

    from posttrain.domains import catalogue
    from posttrain.evals import attackers

    wanted = ["*"] if everything else [*(names or ()), *(SAMPLE if sample else ())]
    if not wanted or (everything and (names or sample)):
        raise UsageError(
            "domains check wants names, or --all, or --sample.", "posttrain domains check --sample"
        )
    found = [entry for pattern in wanted for entry in catalogue.matching(pattern)]
    specs = [catalogue.DomainSpec(name=name) for name in dict.fromkeys(e.name for e in found)]
    caught = attackers.fixtures(fixtures) if fixtures else []
    settings = sources.resolve(None, config, ()).value

    async def run() -> dict[str, Admission]:
        from posttrain.cli import examination

        refused = {}
        doing = Doing()
        async for name, report in examination.examine(
            specs, doing, settings, per_level=per_level, fixtures=caught
        ):
            doing.clear()
            _tell(report, as_json=as_json)
            doing.draw()
            if not report.admitted:
                refused[name] = report
        return refused

    refused = asyncio.run(run())
    if refused:
        shown = [name for name, report in refused.items() if not report.error]
        raise RunError(
            f"{len(refused)} of {len(specs)} domains are not sound: {', '.join(sorted(refused))}.",
            f"posttrain domains show {shown[0]} shows a task of it."
            if shown
            else "correct what is told above, then check again.",
        )
    if not as_json:
        typer.echo(f"{len(specs)} of {len(specs)} domains are sound")


class Doing:
    """Which domains are under examination, on the standard error stream: on a terminal one line
    that is written over, elsewhere a line for each that begins.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        """`quiet`: nothing is written where there is no terminal."""
        self._quiet = quiet
        self._names: list[str] = []
        self._terminal = sys.stderr.isatty()

    def begins(self, name: str) -> None:
        """A domain's examination begins."""
        self._names.append(name)
        if not self._terminal and not self._quiet:
            typer.echo(f"checking {name}", err=True)
        self.draw()

    def ends(self, name: str) -> None:
        """It is over."""
        self._names.remove(name)
        self.draw()

    def clear(self) -> None:
        """Make room for a report."""
        if self._terminal:
            typer.echo("\r\x1b[K", err=True, nl=False)

    def draw(self) -> None:
        """Show the line as it is now."""
        self.clear()
        if self._terminal and self._names:
            line = f"checking {', '.join(self._names)} …"[: shutil.get_terminal_size().columns - 1]
            typer.echo(line, err=True, nl=False)


def _tell(report: Admission, *, as_json: bool) -> None:
    if as_json:
        from posttrain.core import codec

        told = {**codec.to_json(report), "admitted": report.admitted, "reasons": report.reasons}
        typer.echo(json.dumps(told))
        return
    typer.secho("ok      " if report.admitted else "refused ", nl=False, bold=True,
                fg="green" if report.admitted else "red")  # fmt: skip
    constant = f", best constant {report.constant.rate:.2f}" if report.constant else ""
    kills = report.kills
    killed = f", {kills.killed} of {kills.judged} mutants told" if kills and kills.judged else ""
    counts = f"{report.tasks} tasks, {report.distinct} distinct{constant}{killed}"
    typer.echo(f"{report.domain}  ({counts})")
    for line in (*report.reasons, *report.remarks):
        typer.echo(f"        {line}")
