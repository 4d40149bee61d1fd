"""The folder of all that regard stores for a user."""

import os
from pathlib import Path

FOLDER = "REGARD_CACHE"  # the environment variable that names the folder


def cache_folder() -> Path:
    """`$REGARD_CACHE`; else `$XDG_CACHE_HOME/regard`; else `~/.cache/regard`.

    Raises:
        RuntimeError: if neither is set and the user has no home.
    """
    given, base = os.environ.get(FOLDER), Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given:
        return Path(given)
    return (base if base.is_absolute() else Path.home() / ".cache") / "regard"
