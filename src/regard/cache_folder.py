"""The folder of all that regard stores for a user."""

import os
import tempfile
from pathlib import Path

FOLDER = "REGARD_CACHE"  # the environment variable that names the folder


def cache_folder() -> Path:
    """`$REGARD_CACHE`; else `$XDG_CACHE_HOME/regard`; else `~/.cache/regard`.

    Raises:
        FileNotFoundError: if neither is set and the user has no home.
    """
    given, base = os.environ.get(FOLDER), Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given:
        return Path(given)
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "regard"
    except RuntimeError as error:
        raise FileNotFoundError(f"the user has no home folder; set {FOLDER} to a folder") from error


def check_can_store(what: str) -> None:
    """Make the folder and write a file there, before the work whose result is to be stored.

    Args:
        what: the result, in the plural, for the error.

    Raises:
        OSError: naming the folder and the way out.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        raise OSError(
            f"{what} cannot be stored in {folder}: {error.strerror}; set {FOLDER} to a folder that "
            "can be written, on a disk with room"
        ) from error
