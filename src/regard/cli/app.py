"""The verbs; and an error that a user can mend is a sentence and exit code 2, never a traceback."""

import sys
from typing import Annotated

import typer

import regard
from regard.cli.bench import bench_command
from regard.cli.compare import compare_command
from regard.cli.convert import convert_command
from regard.cli.generate import generate_command
from regard.cli.tune import tune_command
from regard.cli.verify import verify_command

app = typer.Typer(
    help="Attention layers that are right, fast and cache-aware; and which one your model wants.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("compare")(compare_command)
app.command("convert")(convert_command)
app.command("generate")(generate_command)
app.command("bench")(bench_command)
app.command("tune")(tune_command)
app.command("verify")(verify_command)


def _version(wanted: bool | None) -> None:
    if wanted:
        sys.stdout.write(f"regard {regard.__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_version, is_eager=True, help="Say which version."),
    ] = None,
) -> None:
    """Options that come before the verb."""


def run() -> int:
    """Run the command line; the exit code."""
    try:
        app()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except (OSError, ValueError, ImportError) as error:
        sys.stderr.write(f"regard: {error}\n")
        return 2
    return 0
