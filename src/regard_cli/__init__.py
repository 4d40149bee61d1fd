"""The command line's entry: options are read here, beside the package, before torch is imported.

Importing `regard.cli` imports `regard`, and so torch, which takes seconds; `regard --version`,
`--help` and a wrong option need neither. What a verb does is in `regard.cli`, one module a verb.
"""

import sys

MISSING = "the regard command needs {}: python -m pip install 'regard[cli]'\n"


def main() -> None:
    """The entry point; says how to install what it lacks."""
    try:
        from regard_cli.app import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.stderr.write(MISSING.format(error.name))
        sys.exit(2)
    sys.exit(run())
