"""regard cache: what regard stores on this disk, and its removal."""

import shutil
from pathlib import Path
from typing import NamedTuple

from regard.cache_folder import FOLDER, cache_folder
from regard.cli.layout import tabulate
from regard.cli.options import DEFAULT_MODEL, Json, named, verb
from regard.cli.terminal import UNWRAPPED, print_json, say, stdout
from regard.page.readable import readable_bytes

COLUMNS = ("--clear", "what", "files", "size")
KINDS = {  # the name of a kind: what it is, and where it lies in the folder
    "model": (f"the default model, {DEFAULT_MODEL}", DEFAULT_MODEL),
    "gguf": ("safetensors copies of GGUF files, 8 GiB at most", "gguf"),
    "compare": ("layers that compare converted, 1 GiB at most", "compare"),
    "compiled": ("compiled kernels", "compiled"),
    "rates": ("rates of this machine, by tune", "speed-*.json"),
}
ALL = "all"
STORED = (*KINDS, ALL)


class Kept(NamedTuple):
    """The number of stored files of one kind, and their bytes."""

    kind: str
    what: str
    files: int
    nbytes: int


@verb
def cache(
    clear: list[str] | None = named(None, STORED, "Remove {}; may be repeated."),
    as_json: Json = False,
) -> None:
    """Files that regard stores on this disk: list them with their sizes, or remove them."""
    chosen = list(KINDS) if ALL in (clear or ()) else list(dict.fromkeys(clear or ()))
    found, folder = [kept(kind) for kind in chosen or KINDS], str(cache_folder())
    for kind in chosen:
        remove(kind)
    if as_json:
        kinds = [each._asdict() for each in found]
        print_json({"folder": folder, "removed": bool(chosen), "kinds": kinds})
        return
    console = stdout(UNWRAPPED)
    total = readable_bytes(sum(each.nbytes for each in found))
    if chosen:
        say(console, f"removed {total} from {folder}: {', '.join(chosen)}")
        return
    say(console, f"{folder} ({FOLDER} names another folder): {total}", bold=folder)
    console.print()
    rows = [
        [each.kind, each.what, f"{each.files:,}", readable_bytes(each.nbytes)] for each in found
    ]
    tabulate(stdout(), COLUMNS, rows)
    console.print()
    say(stdout(), "Next: --clear NAME removes one kind, --clear all removes every kind.")


def kept(kind: str) -> Kept:
    """Count the stored files of a kind, and their bytes."""
    files = [
        file
        for path in _places(kind)
        for file in (path.rglob("*") if path.is_dir() else [path])
        if file.is_file() and not file.is_symlink()
    ]
    sizes = [file.stat().st_size for file in files]
    return Kept(kind, KINDS[kind][0], len(sizes), sum(sizes))


def remove(kind: str) -> None:
    """Remove all files of a kind. They are written again when they are needed.

    Raises:
        OSError: if a file cannot be removed.
    """
    for path in _places(kind):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _places(kind: str) -> list[Path]:
    return sorted(cache_folder().glob(KINDS[kind][1]))


def stored_by_compare() -> str:
    """Size and folder of the converted layers that `regard compare` has stored, to follow another
    statement; "" if there are none."""
    if not (found := kept("compare")).files:
        return ""
    folder = cache_folder() / KINDS["compare"][1]
    return (
        f"; converted layers take {readable_bytes(found.nbytes)} of 1 GiB in {folder} "
        "(regard cache --clear compare)"
    )
