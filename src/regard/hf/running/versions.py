"""The versions of transformers that the families were compared with."""

import warnings
from importlib.metadata import version

OLDEST, NEWEST = (5, 17), (5, 23)


def check_version() -> None:
    """Warn if transformers is a version that the families were not compared with."""
    found = version("transformers")
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not OLDEST <= numbers <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        warnings.warn(
            f"transformers {found} is not one of the versions {oldest} to {newest} that regard.hf "
            "is tested with; compare a few logits before and after install",
            stacklevel=3,
        )
