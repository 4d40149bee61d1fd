"""The command line: one module a verb, results on stdout, all else on stderr."""

import sys

MISSING = "the regard command needs {}: python -m pip install 'regard[cli]'\n"


def main() -> None:
    """The entry point; says how to install what it lacks."""
    try:
        from regard.cli.app import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.stderr.write(MISSING.format(error.name))
        sys.exit(2)
    sys.exit(run())
