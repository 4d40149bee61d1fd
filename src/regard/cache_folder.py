"""The folder of all that regard stores for a user."""

import os
import shutil
import tempfile
from collections.abc import Iterable
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


def remove_oldest(paths: Iterable[Path], most: int, keep: Path) -> None:
    """Remove files, or folders of files, oldest first, until the others take at most `most` bytes;
    never the one to keep."""
    for path in sorted(paths, key=lambda each: (each != keep, -each.stat().st_mtime)):
        files = path.iterdir() if path.is_dir() else [path]
        most -= sum(file.stat().st_size for file in files)
        if most < 0 and path != keep:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


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
