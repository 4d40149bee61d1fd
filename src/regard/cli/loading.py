"""The model of a command, in the dtype and on the device that were asked for."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.hf import load
from regard.hf.loading.checkpoints import stored_dtype


class Loaded(NamedTuple):
    """A model, its tokenizer or None, and the dtype of its checkpoint, which its caches have."""

    model: Any
    tokenizer: Any
    stored: torch.dtype


def load_for(path: Path, *, dtype: str | None, device: str) -> Loaded:
    """Load a model for a command.

    Args:
        path: of a folder, or of a GGUF file.
        dtype: the name of the one that it computes in; if None, float32 on a CPU, where products
            in 16 bits are slow or missing, and the checkpoint's own elsewhere.
        device: where it goes.

    Raises:
        ValueError: if there is no such device here; and as `regard.hf.load`.
    """
    where, stored = device_named(device), stored_dtype(path)
    chosen = torch.float32 if where.type == "cpu" else stored
    if dtype is not None:
        chosen = getattr(torch, dtype)
    model, tokenizer = load(path, dtype=chosen, device=where)
    return Loaded(model, tokenizer, stored)


def device_named(name: str) -> torch.device:
    """The device of `--device`, if torch can use it here.

    Raises:
        ValueError: if not.

    Examples:
        >>> device_named("cpu")
        device(type='cpu')
    """
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
