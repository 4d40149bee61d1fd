"""The verbs and their options, for programs that run them: `regard_cli.app` by its older name."""

from regard_cli.app import app, run

__all__ = ["app", "run"]
