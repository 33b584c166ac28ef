"""`posttrain review`: people look at attempts, say whether the verdict is right, and that counts.

What a policy wrote is shown whole, behind a bar, with every control character spelt out: it cannot
pass for a line of ours or move the cursor. Nobody is shown another person's label of an attempt
that is still under review.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli import runs
from posttrain.core.errors import PreflightError

if TYPE_CHECKING:
    from posttrain.core.trajectory import Trajectory
    from posttrain.evals.desk import Desk
    from posttrain.evals.rates import Rate
    from posttrain.evals.review import Item

app = typer.Typer(help="Review by people.", no_args_is_help=True, rich_markup_mode=None)

Run = Annotated[str, typer.Argument(help="Name or folder of a run.")]
Key = Annotated[str, typer.Argument(help="An attempt, or the beginning of its key.")]
Author = Annotated[str, typer.Option(help="Who reviews.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def now_s() -> float:
    """Seconds since the epoch."""
    return time.time()


def _desk(run: str) -> Desk:
    from posttrain.evals.desk import Desk

    return Desk(runs.find(run))


@app.command("ls")
def ls(run: Run, as_json: AsJson = False) -> None:
    """List the attempts to review, in order."""
    told = [_listed(item) for item in _desk(run).queue()]
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    for one in told:
        sources = "; ".join(f"{name}: {why}" for name, why in one["sources"].items())
        label = f" {one['label']}" if one["label"] else ""
        typer.echo(f"{one['key'][:12]}  {one['state'] + label:22}  {one['domain']}  {sources}")
    states = [one["state"] for one in told]
    typer.echo(", ".join(f"{states.count(s)} {s}" for s in ("open", "claimed", "labelled")))


def _listed(item: Item) -> dict[str, Any]:
    return {
        "key": item.facts.key,
        "domain": item.facts.domain,
        "reward": item.facts.reward,
        "state": str(item.state(now_s())),
        "reviews": len(item.labels),
        "label": item.settled.label if item.settled else None,
        "sources": {str(name): why for name, why in item.chosen.sources.items()},
        "inclusion": item.chosen.inclusion,
    }


@app.command("next", short_help="Claim an attempt and show it.")
def next_(run: Run, author: Author) -> None:
    """Claim the next attempt, or come back to the one you hold, and show all there is to see."""
    desk = _desk(run)
    queue, claim = desk.write(lambda queue: queue.claim(author.strip(), now_s()))
    if claim is None:
        typer.echo(f"nothing is left for {author} to review")
        return
    item = queue.find(claim.key)
    _show(item, desk)
    minutes = (claim.until_s - now_s()) / 60
    typer.secho(f"\nYours for {minutes:.0f} minutes.", bold=True)
    said = f"{run} {claim.key[:12]} LABEL --author {author} --reason TEXT"
    typer.echo(f"next:  posttrain review label {said}")
    typer.echo("LABEL: right, false_accept, false_reject, hack, task_bug or unclear")


@app.command("label")
def label(
    run: Run,
    key: Key,
    label: Annotated[
        str,
        typer.Argument(help="right, false_accept, false_reject, hack, task_bug or unclear."),
    ],
    author: Author,
    reason: Annotated[str, typer.Option(help="Why, in a sentence.")] = "",
) -> None:
    """Say whether the verdict of an attempt you hold is right."""
    who = author.strip()
    _, event = _desk(run).write(
        lambda queue: queue.label(key, label, author=who, reason=reason, now_s=now_s())
    )
    assert event is not None
    typer.echo(f"{event.key[:12]} is labelled {event.label}")


@app.command("decline")
def decline(run: Run, key: Key, author: Author) -> None:
    """Give an attempt back; you are not offered it again."""
    who = author.strip()
    _, event = _desk(run).write(lambda queue: queue.decline(key, author=who, now_s=now_s()))
    assert event is not None
    typer.echo(f"{event.key[:12]} goes back to the queue")


@app.command("plan", short_help="Show or set how much is reviewed.")
def plan(
    run: Run,
    share: Annotated[float | None, typer.Option(help="Of a domain's accepts and rejects.")] = None,
    least: Annotated[int | None, typer.Option(help="Of each of them, at least.")] = None,
    second: Annotated[float | None, typer.Option(help="Share reviewed twice.")] = None,
    lease_s: Annotated[float | None, typer.Option(help="Length of a claim, seconds.")] = None,
) -> None:
    """Show how much is reviewed; with options, set it from now on."""
    desk = _desk(run)
    found = desk.queue().plan
    given: dict[str, Any] = {"share": share, "least": least, "second": second, "lease_s": lease_s}
    if changed := {name: value for name, value in given.items() if value is not None}:
        found = replace(found, **changed)
        desk.plan(found)
    for name, value in asdict(found).items():
        typer.echo(f"{name} = {value:g}")


@app.command("rates")
def rates(run: Run, as_json: AsJson = False) -> None:
    """Tell how often verdicts are wrong, and how far reviewers agree."""
    from posttrain.evals import rates

    items = list(_desk(run).queue())
    found, agreed = rates.rates(items), rates.agreement(items)
    if as_json:
        told = {"rates": [asdict(one) for one in found], "agreement": asdict(agreed)}
        typer.echo(json.dumps(told, indent=2))
        return
    for one in found:
        typer.secho(" ".join([one.domain, one.verifier]).strip(), bold=True)
        typer.echo(f"  wrong among accepted: {_rate(one.false_accept)}")
        typer.echo(f"  wrong among rejected: {_rate(one.false_reject)}")
    kappa = "" if agreed.kappa is None else f", kappa {agreed.kappa:.2f}"
    typer.echo(f"two reviewers agree on {agreed.same} of {agreed.pairs} attempts{kappa}")


def _rate(rate: Rate) -> str:
    counted = f"{rate.labelled} of {rate.sampled} sampled attempts labelled"
    if rate.rate is None:
        return f"unknown ({counted})"
    low, high = 100 * rate.interval.low, 100 * rate.interval.high
    return f"{100 * rate.rate:.1f} % (95 %: {low:.1f} – {high:.1f}; {counted})"


@app.command("export", short_help="Write what labels teach: fixtures, preferences.")
def export(
    run: Run,
    fixtures: Annotated[
        Path | None, typer.Option(help="Folder for attacks that were caught.")
    ] = None,
    preferences: Annotated[
        Path | None, typer.Option(help="File (JSON lines) to train a reward model on.")
    ] = None,
) -> None:
    """Write hacks and false accepts as fixtures for `domains check`, and what attempts deserve as
    labels and pairs for a reward model.
    """
    desk = _desk(run)
    items = list(desk.queue())
    try:
        if fixtures is not None:
            found = desk.fixtures(items)
            fixtures.mkdir(parents=True, exist_ok=True)
            for name, fixture in found.items():
                (fixtures / name).write_text(_pretty(fixture) + "\n", encoding="utf-8")
            typer.echo(f"{len(found)} fixtures in {fixtures}")
        if preferences is not None:
            lines = [json.dumps(record) + "\n" for record in desk.preferences(items)]
            preferences.write_text("".join(lines), encoding="utf-8")
            typer.echo(f"{len(lines)} records in {preferences}")
    except OSError as error:
        raise PreflightError(f"cannot write {error.filename}: {error.strerror}.") from error


@app.command("apply")
def apply(run: Run) -> None:
    """Give attempts the rewards that people settled on."""
    typer.echo(f"{_desk(run).relabel()} rewards corrected")


# --- what a reviewer sees ---------------------------------------------------------------------


def visible(text: str) -> str:
    r"""Text of a policy, for a terminal.

    >>> visible("a\x1b[2Kb\u202ec\n\tö")
    'a\\x1b[2Kb\\u202ec\n\tö'
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def _show(item: Item, desk: Desk) -> None:
    facts = item.facts
    typer.secho(f"attempt {facts.key}  {facts.domain}, level {facts.level}", bold=True)
    for name, why in item.chosen.sources.items():
        typer.echo(f"here because of {name}: {why}")
    made = desk.trajectory(facts.key)
    if made is None:
        typer.echo("The journal lost what it said; `unclear` is all that can be said of it.")
        return
    described = made.task.description
    told = [f"- {rule}" for rule in described.constraints]
    told += [f"tool {tool.name}: {tool.description}" for tool in described.tools]
    _part("Task", [described.objective, *told])
    _turns(made)
    typer.echo(f"\nstopped: {made.stop}; reward {facts.reward:g} ({made.outcome})")
    components = made.verdict.components if made.verdict else ()
    for part in components:
        value = "none" if part.value is None else f"{part.value:g}"
        role = "gate" if part.gate else f"weight {part.weight:g}"
        _part(
            f"{part.name} = {value}  ({part.place}, {role}, {part.verifier})",
            [part.error or "", _pretty(part.evidence) if part.evidence else ""],
        )
    for reward, other in desk.contrast(item):
        typer.secho(f"\nAnother attempt at this task, reward {reward:g}", bold=True)
        _turns(other)


def _turns(made: Trajectory) -> None:
    for number, turn in enumerate(made.turns, 1):
        given = made.task.prefix if number == 1 else ""
        _part(f"Turn {number}", [given + turn.text])
        for place, call in enumerate(turn.tool_calls):
            said = call.raw or json.dumps(call.arguments, ensure_ascii=False)
            _part(f"Turn {number}, call of {visible(call.name)}", [said])
            _part(f"Turn {number}, result", list(turn.observations[place : place + 1]))


def _part(title: str, texts: Iterable[str]) -> None:
    lines = [line for text in texts if text for line in visible(text).split("\n")]
    typer.secho(f"\n{title}", bold=True)
    for line in lines:
        typer.echo(f"│ {line}")


def _pretty(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
