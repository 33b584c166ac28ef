"""`posttrain models`: what is in the model cache, and fetching into it."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Models on this machine.", no_args_is_help=True, rich_markup_mode=None)


@app.command("ls")
def ls() -> None:
    """List the models of the cache."""
    from posttrain.engine import models

    found = models.ls()
    for model in found:
        typer.echo(f"{model.name:32} {model.size_bytes / 2**20:8.0f} MiB  {model.path}")
    for name in models.SOURCES:
        if name not in {model.name for model in found}:
            typer.echo(f"{name:32} not fetched    posttrain models fetch {name}")


@app.command("fetch", short_help="Fetch a model into the cache.")
def fetch(
    name: Annotated[
        str, typer.Argument(help="smollm2-135m, or owner/name of the Hugging Face hub.")
    ],
) -> None:
    """Fetch a model into the cache; does nothing where it is there already."""
    from posttrain.engine import models

    typer.echo(f"{name}: {models.fetch(name)}")
