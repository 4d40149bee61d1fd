"""The verb `verify`: that of regard-verify, or, where that is missing, how to install it."""

from collections.abc import Callable
from typing import Annotated

import typer

from regard.cli.options import VERBS, app

MISSING = (
    "regard verify needs regard-verify: python -m pip install 'regard-verify[cli]', or, from a "
    "clone of regard, python -m pip install './packages/regard-verify[cli]'"
)


def verb_of_regard_verify() -> Callable[..., None]:
    """The function whose parameters are the options of the verb.

    Raises:
        ModuleNotFoundError: if a package other than regard-verify is missing.
    """
    try:
        from regard_verify.command import verify
    except ModuleNotFoundError as error:
        if error.name != "regard_verify":
            raise
        return missing
    return verify


def missing(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="SUBJECT")] = None,
) -> None:
    """Check an attention of any origin; it needs the package regard-verify."""
    raise ImportError(MISSING)


def add_verify() -> None:
    """Add the verb to the command line of regard."""
    verb = verb_of_regard_verify()
    VERBS["verify"] = verb
    first_line = (verb.__doc__ or "").partition("\n")[0]
    lenient = {"ignore_unknown_options": True} if verb is missing else {}
    app.command("verify", short_help=first_line, context_settings=lenient)(verb)
