"""Prefixes of prompts in a folder: found by the next process that generates with the same model."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.cache.paging.pool import PagePool
from regard.hf.generating.cache_of_model import cache
from regard.hf.generating.watching import called_module
from regard.whole_file import check_can_write, errors_that_name

FILE = "prefixes.safetensors"
TOKENS = 16_384  # tokens in the file at most: of SmolLM2, 720 MiB in float32, 110 MiB as K8V4


def _make(folder: Path) -> None:
    """Make the folder, and raise an `OSError` now if no file can be written in it."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file or a broken link; give a folder for prefixes")
    with errors_that_name(folder):
        folder.mkdir(parents=True, exist_ok=True)
    check_can_write(folder / FILE)


@contextmanager
def prefixes_in(folder: str | Path, model: Any, *, format: str = "plain") -> Iterator[PagePool]:
    """A pool with the prefixes that a folder holds, for caches inside of the `with` block.

    After it, prefixes are stored in the folder again: the `TOKENS` used last.

    Args:
        folder: it is made if it is not there. Only its owner can read the file in it.
        model: the model that computes them.
        format: of the pages.

    Raises:
        OSError: if the folder cannot be read or written.
        ValueError: if its prefixes are of other weights or another format; they stay as they are.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} has an encoder: what its decoder caches depends on more than "
            "the decoder's tokens, and no prefix is stored; leave the folder for prefixes out"
        )
    folder = Path(folder)
    _make(folder)
    path, empty = folder / FILE, cache(model, "paged", format=format)
    pool: PagePool = empty.pool
    if path.exists():
        device = next(model.parameters()).device
        try:
            pool.load(path, weights=called_module(model), device=device)
        except ValueError as error:
            raise ValueError(f"{error}; or give another folder for prefixes") from error
    yield pool
    pool.evict(keep=len(empty.layers) * (TOKENS // pool.page_size))
    pool.save(path)
