"""The options of the command `regard-verify`, which `regard verify` has, too.

They are parsed before torch is imported. An error of the user is a sentence and exit code 2.
"""

import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from regard_verify import __version__
from regard_verify.writing import console_of, say


def _print_version(wanted: bool | None) -> None:
    if wanted:
        sys.stdout.write(f"regard-verify {__version__}\n")
        raise typer.Exit


def verify(
    subject: Annotated[
        str | None, typer.Argument(help="PATH.py:NAME or package.module:NAME.", show_default=False)
    ] = None,
    like: Annotated[
        list[str] | None,
        typer.Option("--like", help="A convention, name=value; may be repeated. Values are JSON."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A law to check; may be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, no torch.compile.")] = False,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds for one law.")] = 30.0,
    memory: Annotated[float, typer.Option(min=0.1, help="GiB the subject may take.")] = 4.0,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page.")] = None,
    sarif: Annotated[
        Path | None, typer.Option(help="Write what is wrong as SARIF, for code scanning.")
    ] = None,
    badge: Annotated[
        Path | None, typer.Option(help="Write a badge as JSON, for shields.io.")
    ] = None,
    annotate: Annotated[
        bool, typer.Option("--annotate", help="Print what is wrong for GitHub's pull requests.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Only JSON on stdout.")] = False,
    every_law: Annotated[
        bool, typer.Option("--all", help="Show laws that are kept or do not apply, too.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the laws and stop.")] = False,
    version: Annotated[
        bool | None,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = None,
) -> None:
    """Check an attention of any origin: which laws it breaks, with the smallest case of each.

    Exit codes: 0 if no law is broken, 1 if one is, 2 if the subject could not be understood or
    the options are wrong, 3 if no law is broken but not all could be judged.
    """
    if subject is None and not listed:
        raise typer.BadParameter("give PATH.py:NAME, or --list", param_hint="SUBJECT")
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: one thread can be forked
    gc.disable()  # importing torch makes a million objects, none of which is garbage
    from regard_verify import terminal

    gc.freeze()  # neither this process at its end nor its fork looks through them: 0.4 s
    gc.enable()

    code = terminal.verify(
        subject, like=like or (), files={"html": html, "sarif": sarif, "badge": badge},
        as_json=as_json, annotate=annotate, every_law=every_law, listed=listed,
        only=only, quick=quick, seed=seed, limit=limit, memory=memory,
    )  # fmt: skip
    if code:
        raise typer.Exit(code)


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: in panels of 60 columns option names are cut
)
app.command()(verify)


def run() -> int:
    """Run the command line; returns the exit code."""
    try:
        app(prog_name="regard-verify")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except (OSError, ValueError, ImportError) as error:
        for line in f"regard-verify: {error}".split("\n"):
            say(console_of(stderr=True), line)
        return 2
    return 0
