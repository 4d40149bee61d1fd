"""The verbs of the command line, one module each: results on stdout, all else on stderr.

Their options are in `regard_cli`, which imports these modules only when a verb runs.
"""

from regard_cli import main

__all__ = ["main"]
