"""`posttrain report`: rebuild the report of a run from its folder."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.cli import runs


def report(run: Annotated[str, typer.Argument(help="Name or folder of a run.")]) -> None:
    """Rebuild the report of a run and print where it is."""
    from posttrain.cli import results

    folder = runs.find(run)
    results.tell(folder)
    if (folder / "review.jsonl").exists():
        from posttrain.evals.desk import Desk

        queue = Desk(folder).queue()
        labelled = sum(bool(item.labels) for item in queue)
        typer.echo(
            f"review: {labelled} attempts labelled, {len(queue.corrections)} rewards corrected"
        )
