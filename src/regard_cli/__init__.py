"""The entry point of the command line: options are parsed before torch is imported.

Importing `regard.cli` imports `regard`, and so torch, which takes seconds; `regard --version`,
`--help` and wrong options need neither. The verbs are in `regard.cli`, one module each.
"""

import sys
from importlib import metadata

MISSING = "the regard command needs {}: python -m pip install 'regard[cli]'\n"


def main() -> None:
    """Run the command; if a package is missing, print the version, or how to install it."""
    try:
        from regard_cli.app import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich", "click"):
            raise
        if sys.argv[1:] == ["--version"]:
            sys.stdout.write(f"regard {metadata.version('regard')}\n")
            sys.exit(0)
        sys.stderr.write(MISSING.format(error.name))
        sys.exit(2)
    sys.exit(run())
