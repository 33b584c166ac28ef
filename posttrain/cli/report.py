"""`posttrain report`: rebuild the report of a run from its folder."""

from __future__ import annotations

from typing import Annotated

import typer

from posttrain.cli import runs


def report(run: Annotated[str, typer.Argument(help="Name or folder of a run.")]) -> None:
    """Rebuild the report of a run and print where it is."""
    from posttrain.cli import results
    from posttrain.evals import report as reports

    folder = runs.find(run)
    page = reports.write(folder)
    results.show(reports.load(folder).outcomes)
    typer.echo(f"report: {page}")
