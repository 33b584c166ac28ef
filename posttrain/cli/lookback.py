"""Looking back at a run: judging its attempts again, taking it back, releasing its domains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli import runs, sources
from posttrain.core.errors import UsageError, nearest

if TYPE_CHECKING:
    from posttrain.loop.past import Past
    from posttrain.loop.reverify import Reverification

Run = Annotated[str, typer.Argument(help="Name or folder of a run.")]
MAX_STEPS_SHOWN = 12


def reverify(
    run: Run,
    domain: Annotated[
        list[str] | None, typer.Option("--domain", help="Only this one; may be repeated.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option(help="New hidden inputs instead of those of the recorded verdicts.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Judge what a run's attempts said and left once more, with the checks and verifiers of today,
    and with the hidden inputs of then. New verdicts are appended and count from then on; nothing is
    overwritten.
    """
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from posttrain.loop import lookback

    folder = runs.find(run)
    config = sources.saved(folder).value
    console = Console(stderr=True)

    async def work() -> tuple[Reverification, Past]:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
            bar = shown.add_task("judging again", total=None)
            opened = lookback.open_reverifier(config, folder, _Silent(), fresh=fresh)
            async with opened as (verifier, past):
                known = sorted({drawn.domain for drawn in past.draws.values()})
                for name in domain or ():
                    if name not in known:
                        raise UsageError(
                            f"the run has no attempts at '{name}'{nearest(name, known)}.",
                            f"name one of {', '.join(known)}",
                        )
                found = await verifier.run(
                    domains=domain or (),
                    told=lambda done, total: shown.update(bar, completed=done, total=total),
                )
                return found, past

    with runs.crash_file(folder):
        found, past = asyncio.run(work())
    if as_json:
        typer.echo(json.dumps(_as_json(found)))
    else:
        _show(found, folder, past)


class _Silent:
    """Nobody watches: what there is to say comes at the end."""

    def record(self, kind: str, data: object) -> None:
        pass


def _as_json(found: Reverification) -> dict[str, object]:
    return {
        "judged": len(found.changes),
        "flipped": sum(change.flipped for change in found.changes),
        "changed": sum(change.changed for change in found.changes),
        "domains": {
            name: {f"{before.value} → {after.value}": n for (before, after), n in counts.items()}
            for name, counts in found.table().items()
        },
        "affected_steps": {str(step): n for step, n in found.affected_steps().items()},
        "flips": [
            {"key": c.key, "domain": c.domain, "before": c.before, "after": c.after, "step": c.step}
            for c in found.changes
            if c.flipped
        ],
        "left_out": dict(found.left_out),
        "remarks": dict(found.remarks),
    }


def _show(found: Reverification, folder: Path, past: Past) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from posttrain.loop.reverify import Standing
    from posttrain.loop.rollback import kept

    same = [(one, one) for one in Standing]
    pairs = [(one, other) for one in Standing for other in Standing if one is not other]
    pairs = [pair for pair in pairs if any(pair in c for c in found.table().values())]
    table = Table(box=SIMPLE_HEAD, title="Verdicts, before → now")
    for column in ("domain", "judged", "as before", *(f"{a} → {b}" for a, b in pairs)):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for name, counts in found.table().items():
        cells = [counts.total(), sum(counts[p] for p in same), *(counts[p] for p in pairs)]
        table.add_row(name, *map(str, cells))
    Console().print(table)
    for reason, count in (*found.left_out.most_common(), *found.remarks.most_common()):
        typer.echo(f"{count} attempts: {reason}")
    affected = found.affected_steps()
    if not affected:
        typer.echo("No step was trained on a reward that is another one now.")
        return
    shown = ", ".join(f"{at} ({n})" for at, n in list(affected.items())[:MAX_STEPS_SHOWN])
    more = f" and {len(affected) - MAX_STEPS_SHOWN} more" if len(affected) > MAX_STEPS_SHOWN else ""
    of = f"{len(affected)} of {past.account.step} steps were"
    typer.echo(f"{of} trained on rewards that are others now: {shown}{more}.")
    target = max((step for step in kept(folder, past) if step < min(affected)), default=0)
    typer.echo(f"next:  posttrain rollback {folder.name} --to {target}")


def rollback(
    run: Run,
    to: Annotated[int, typer.Option("--to", min=0, help="Step to go back to; 0: the beginning.")],
    reason: Annotated[str, typer.Option(help="Kept in the ledger.")] = "",
) -> None:
    """Take a run back to its newest checkpoint at or before a step. It goes on from there with
    `train --resume`, under the rewards that count by now; nothing is deleted.
    """
    from posttrain.loop import lookback
    from posttrain.loop.rollback import roll_back

    folder = runs.find(run)
    with lookback.open_ledger(folder) as (ledger, past):
        done = roll_back(folder, ledger, past, to=to, reason=reason)
    typer.echo(
        f"{folder.name} goes back from step {done.before} to step {done.step} "
        f"(weights version {done.version}); {done.released} attempts wait to be trained again."
    )
    if done.aside:
        typer.echo(f"{len(done.aside)} later checkpoints are in {done.aside[0].parent}.")
    typer.echo(f"next:  posttrain train --resume {folder.name}")


def release(
    run: Run,
    domain: Annotated[str, typer.Argument(help="A domain that is held or quarantined.")],
    reason: Annotated[str, typer.Option(help="What a look at its attempts showed.")],
) -> None:
    """Let a domain be trained on again that an alarm of its verifier's monitor holds, or that is
    quarantined; what is seen from then on is the monitor's new reference.
    """
    from posttrain.core.events import Controlled
    from posttrain.loop import lookback
    from posttrain.loop.past import RELEASE

    folder = runs.find(run)
    with lookback.open_ledger(folder) as (ledger, past):
        out = past.held | past.quarantined
        if domain not in out:
            held = ", ".join(sorted(out)) or "none"
            raise UsageError(
                f"'{domain}' is not held{nearest(domain, out)} (held: {held}).",
                f"posttrain review next {folder.name} --author NAME",
            )
        ledger.append(Controlled(action=RELEASE, arguments={"domain": domain, "reason": reason}))
        ledger.sync()
    typer.echo(f"{domain} is trained on again from the next resume on.")
    typer.echo(f"next:  posttrain train --resume {folder.name}")


def quarantine(
    run: Run,
    domain: Annotated[str, typer.Argument(help="A domain that the run trains on.")],
    reason: Annotated[str, typer.Option(help="What a look at its attempts showed.")],
) -> None:
    """Take a domain out of training, with what waits of it, until it is released."""
    from posttrain.core.events import Controlled
    from posttrain.loop import lookback
    from posttrain.loop.past import QUARANTINE

    folder = runs.find(run)
    with lookback.open_ledger(folder) as (ledger, past):
        known = {draw.domain for draw in past.draws.values()}
        if domain not in known:
            raise UsageError(
                f"no attempt is of '{domain}'{nearest(domain, known)}.",
                "name one of " + (", ".join(sorted(known)) or "none: nothing was drawn yet"),
            )
        arguments = {"domain": domain, "evidence": f"taken out by people: {reason}"}
        ledger.append(Controlled(action=QUARANTINE, arguments=arguments))
        ledger.sync()
    typer.echo(f"{domain} is trained on no more; its verdicts so far stand.")
    typer.echo(f"next:  posttrain reverify {folder.name} --domain {domain}")
