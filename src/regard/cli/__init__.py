"""The command line: results on stdout, all else on stderr.

A verb is a typer function in the module of its name. Modules with verbs import no torch, and a verb
imports it once its options are checked: help, the version and refused options take 0.3 s.
"""

import sys

from regard import __version__

MISSING = "the regard command needs {}: python -m pip install 'regard[cli]'\n"


def main() -> None:
    """Run the command; if a package is missing, print the version, or how to install it."""
    try:
        from regard.cli.app import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich", "click"):
            raise
        if sys.argv[1:] == ["--version"]:
            sys.stdout.write(f"regard {__version__}\n")
            sys.exit(0)
        sys.stderr.write(MISSING.format(error.name))
        sys.exit(2)
    sys.exit(run())
