"""The packages that regard.hf needs: whether they are installed, their version, their output."""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

OLDEST, NEWEST = (5, 17), (5, 24)  # versions of transformers that the families are tested with

CACHES = ("past_key_values", "cache")  # the argument of a cache before transformers 5.24, and since


def cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a call, under either of its names; None without one."""
    return next((given[name] for name in CACHES if given.get(name) is not None), None)


def cache_argument(forward: Any) -> str:
    """The name under which a forward takes its cache; "" if it takes none."""
    takes = inspect.signature(forward).parameters
    return next((name for name in CACHES if name in takes), "")


def name_of_cache(model: Any) -> str:
    """The name under which a model takes its cache, also where `forward` was replaced by a function
    of any arguments."""
    return cache_argument(model.forward) or cache_argument(type(model).forward) or CACHES[0]


def require(*packages: str) -> None:
    """Raise an ImportError that says how to install what is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ImportError(
            f"regard.hf needs {', '.join(missing)}: python -m pip install 'regard[hf]'"
        )


def check_version() -> None:
    """Warn if the families are not tested with the installed version of transformers."""
    found = version("transformers")
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not OLDEST <= numbers <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        warnings.warn(
            f"transformers {found} is not one of the versions {oldest} to {newest} that regard.hf "
            "is tested with; compare a few logits before and after install",
            stacklevel=3,
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and notes of transformers, for programs that show their own."""
    require("transformers", "tqdm")
    import tqdm
    from transformers.utils import logging

    construct = tqdm.tqdm.__init__
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # the GGUF reader has no option for its bar
    tqdm.tqdm.__init__ = partialmethod(construct, disable=True)
    try:
        yield
    finally:
        tqdm.tqdm.__init__ = construct
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
