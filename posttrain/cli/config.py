"""`posttrain config`: the resolved configuration, and every setting there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli import sources

app = typer.Typer(help="The configuration.", no_args_is_help=True, rich_markup_mode=None)

Preset = Annotated[str | None, typer.Option(help="A preset: smoke, demo or laptop.")]
File = Annotated[Path | None, typer.Option("--config", help="A TOML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value; may be repeated.")
]


@app.command("show", short_help="Print the resolved configuration, with origins.")
def show(preset: Preset = None, config: File = None, overrides: Overrides = None) -> None:
    """Print the resolved configuration as TOML, the origin of every value as a comment."""
    typer.echo(sources.resolve(preset, config, overrides or ()).dump(), nl=False)


@app.command("schema")
def schema(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON Schema.")] = False,
) -> None:
    """List every setting with its type, default and meaning."""
    from posttrain.core import keys, toml
    from posttrain.loop.settings import RunConfig

    if as_json:
        typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))
        return
    for key in keys.known(RunConfig):
        name = toml.dotted(key.path)
        if key.section:
            typer.echo(f"\n[{name}]  {key.description}".rstrip())
            continue
        default = "required" if key.required else f"default {json.dumps(key.default, default=str)}"
        typer.echo(f"{name}  ({key.kind}; {default})")
        if key.description:
            typer.echo(f"    {' '.join(key.description.split())}")
