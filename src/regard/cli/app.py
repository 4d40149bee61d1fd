"""The command line: its verbs, its errors, and its version.

An error of the user is a sentence and exit code 2; after a closed pipe the code is 141.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import StringIO
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import regard
from regard.cli.options import app, option, verb
from regard.cli.terminal import printable, wrapped

for name in (
    *("show_mask", "show_attention", "describe", "plan", "explain"),
    *("compare", "convert", "generate", "bench", "tune", "cache"),
):
    import_module(f"regard.cli.{name}")  # its verbs join `app`

CLOSED = 128 + 13  # SIGPIPE: nobody reads what is printed

__all__ = ["app", "run"]


def _ask_for_verify(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="SUBJECT")] = None,
) -> None:
    """Check an attention of any origin; it needs the package regard-verify."""
    raise ImportError(
        "regard verify needs regard-verify: python -m pip install 'regard-verify[cli]', or, from a "
        "clone of regard, python -m pip install './packages/regard-verify[cli]'"
    )


try:
    from regard_verify.command import verify
except ModuleNotFoundError as error:
    if error.name != "regard_verify":
        raise
    _ask_for_verify.__name__ = "verify"  # the verb's
    verb(_ask_for_verify, context_settings={"ignore_unknown_options": True})
else:
    verb(verify)


def _version(wanted: bool | None) -> None:
    if wanted:
        print(f"regard {regard.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool | None = option(
        None, "Print the version.", "--version", callback=_version, is_eager=True
    ),
) -> None:
    """Options that come before the verb."""


def run() -> int:
    """Run the command line; the exit code."""
    sys.stdout, sys.stderr = sys.stdout or StringIO(), sys.stderr or StringIO()  # None if closed
    try:
        try:
            with _printable_warnings():
                app(prog_name="regard")
        except SystemExit as done:
            if isinstance(done.__context__, BrokenPipeError):
                raise done.__context__ from None
            sys.stdout.flush()
            return done.code if isinstance(done.code, int) else int(done.code is not None)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is flushed at the end
        return CLOSED
    except (OSError, ValueError, ImportError) as error:
        _complain(f"regard: {error}")
        return 2
    return 0


@contextmanager
def _printable_warnings() -> Iterator[None]:
    """Warnings may quote files, too."""
    usual = warnings.formatwarning

    def formatted(*given: Any, **named: Any) -> str:
        return "\n".join(map(printable, usual(*given, **named).split("\n")))

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _complain(sentence: str) -> None:
    """Print on stderr; on a terminal, wrapped between words."""
    console = Console(stderr=True, highlight=False)
    sentence = "\n".join(map(printable, sentence.split("\n")))  # it may quote files
    if console.is_terminal:
        sentence = wrapped(sentence, console.width)
    console.print(Text(sentence), soft_wrap=True)
