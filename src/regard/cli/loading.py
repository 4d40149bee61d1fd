"""The model of a command, in the dtype and on the device that were asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.hf import SMOLLM2, fetch_smollm2, load
from regard.hf.loading.checkpoints import stored_dtype


class Loaded(NamedTuple):
    """A model, its tokenizer or None, the dtype of its checkpoint, which its caches have; its
    name."""

    model: Any
    tokenizer: Any
    stored: torch.dtype
    name: str


def load_for(
    path: Path | None,
    *,
    dtype: str | None,
    device: str,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Loaded:
    """Load a model for a command; a ValueError is raised if there is no such device here, and as by
    `regard.hf.load`. `progress` is told of the fetching.

    Without a path it is SmolLM2, which is fetched the first time. Without the name of a dtype it
    computes in float32 on a CPU, where products in 16 bits are slow or missing, and in the
    checkpoint's own elsewhere.
    """
    if path is None:
        progress(f"loading {SMOLLM2} (fetched the first time: 93 MB)", 0, 0)
        path = fetch_smollm2()
    where, stored = device_named(device), stored_dtype(path)
    chosen = torch.float32 if where.type == "cpu" else stored
    if dtype is not None:
        chosen = getattr(torch, dtype)
    model, tokenizer = load(path, dtype=chosen, device=where)
    return Loaded(model, tokenizer, stored, path.absolute().name)


def device_named(name: str) -> torch.device:
    """The device of `--device`. Raises a ValueError if torch cannot use it here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"--device {name[:40]!r} is no device of torch; give cpu or cuda"
        ) from error
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"--device {name} cannot be used by torch here: {reason}") from error
    if device.type == "meta":
        raise ValueError("--device meta computes nothing; give cpu or cuda")
    return device
