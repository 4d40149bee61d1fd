"""The entry point of the command `regard-verify`: it says which package the command line lacks."""

import sys

MISSING = "the regard-verify command needs {}: python -m pip install 'regard-verify[cli]'\n"


def main() -> int:
    """Run the command; returns its exit code."""
    try:
        from regard_verify.command import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.stderr.write(MISSING.format(error.name))
        return 2
    return run()
