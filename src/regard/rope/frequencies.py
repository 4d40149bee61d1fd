"""What every scaling is made with: plain frequencies, kept tensors, numbers that are checked."""

import math
from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

Device = torch.device | str | None


def paste(value: Any, *, always: int = 1, **derived: Any) -> str:
    """The code that builds a dataclass: its first `always` fields bare, others unless implied.

    A field is implied by its default, or by the value it is `derived` to when not given.
    """
    shown = []
    for i, field in enumerate(fields(value)):
        content = getattr(value, field.name)
        if i < always:
            shown.append(repr(content))
        elif content != derived.get(field.name, field.default):
            shown.append(f"{field.name}={content!r}")
    return f"{type(value).__name__}({', '.join(shown)})"


def plain_frequencies(
    dim: int, theta: float | int, device: Device = None
) -> Float64[Tensor, " half"]:
    """The unscaled frequencies `theta ** (-2i / dim)` of RoFormer (arXiv 2104.09864), in float64.

    >>> plain_frequencies(4, 100.0)
    tensor([1.0000, 0.1000], dtype=torch.float64)
    """
    fractions = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    return torch.pow(float(theta), -fractions)


def require_positive(owner: str, **values: Any) -> None:
    """Raise unless every value is a finite number above 0, or None: TypeError or ValueError."""
    for name, value in values.items():
        if value is None:
            continue
        _require_number(owner, name, value)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{owner}: {name} must be finite and greater than 0, got {value!r}")


def require_finite(owner: str, **values: Any) -> None:
    """Raise unless every value is a finite number: TypeError or ValueError."""
    for name, value in values.items():
        _require_number(owner, name, value)
        if not math.isfinite(value):
            raise ValueError(f"{owner}: {name} must be finite, got {value!r}")


def _require_number(owner: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r}")
