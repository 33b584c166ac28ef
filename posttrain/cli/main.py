"""The entry point `posttrain`: commands, exit codes, and errors as one clear paragraph.

Commands import what they need when they run, so that `--help` answers at once. The one thing that
must stay true: no traceback reaches the terminal, and the exit code tells what happened (0 done,
1 the run failed, 2 a usage error, 3 this machine lacks something, 130 interrupted).
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import posttrain
from posttrain.cli import (
    config,
    doctor,
    domains,
    evaluate,
    lookback,
    models,
    report,
    review,
    train,
)
from posttrain.cli.stopping import INTERRUPTED
from posttrain.core.errors import PosttrainError

app = typer.Typer(
    name="posttrain",
    help="Make a pre-trained language model better at many task domains at once, and prove it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("doctor")(doctor.doctor)
app.command("train", short_help="Train, evaluate and report.")(train.train)
app.command("eval", short_help="Evaluate a run or a model on held-out tasks.")(evaluate.evaluate)
app.command("report")(report.report)
app.command("reverify", short_help="Judge a run's attempts again.")(lookback.reverify)
app.command("rollback", short_help="Take a run back to an earlier step.")(lookback.rollback)
app.command("release", short_help="Train again on a held domain.")(lookback.release)
app.command("quarantine", short_help="Take a domain out of training.")(lookback.quarantine)
app.add_typer(models.app, name="models")
app.add_typer(domains.app, name="domains")
app.add_typer(review.app, name="review")
app.add_typer(config.app, name="config")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"posttrain {posttrain.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Write the traceback of an error to a file.")
    ] = False,
) -> None:
    """Options of every command."""
    del version  # its callback has ended the command
    del debug  # read by `run`, which must know it before a command can fail


def main() -> None:
    """Run the command line of this process and exit with its code."""
    from posttrain.engine import threads

    threads.configure()  # before anything imports torch
    code = run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # libraries clean up: no place for a traceback
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command; the exit code."""
    try:
        app(list(arguments), standalone_mode=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        return INTERRUPTED
    except PosttrainError as error:
        _tell(error, debug="--debug" in arguments)
        return error.exit_code
    except Exception as error:
        _tell(error, debug="--debug" in arguments)
        return 1
    return 0


def _tell(error: Exception, *, debug: bool) -> None:
    """One paragraph on the standard error stream, and the traceback in a file where asked."""
    if isinstance(error, PosttrainError):
        typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
        typer.echo(error.message, err=True)
        if error.next_step:
            typer.echo(f"next:  {error.next_step}", err=True)
    else:
        typer.secho("internal error: ", fg="red", bold=True, err=True, nl=False)
        typer.echo(f"{type(error).__name__}: {error}", err=True)
    for note in getattr(error, "__notes__", ()):
        typer.echo(note, err=True)
    if debug:
        path = Path(f"posttrain-error-{time.strftime('%Y%m%d-%H%M%S')}.txt")
        try:
            path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            typer.echo(f"The traceback is in {path}.", err=True)
        except OSError as problem:
            typer.echo(f"The traceback cannot be written: {problem}.", err=True)
    elif not isinstance(error, PosttrainError) and not getattr(error, "__notes__", ()):
        typer.echo("Run it again with `posttrain --debug …` to get a traceback file.", err=True)


if __name__ == "__main__":
    main()
