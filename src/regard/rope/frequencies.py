"""The frequencies of RoPE without scaling, and checks of numeric arguments."""

import math
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from regard.constants import Device


def plain_frequencies(
    dim: int, theta: float | int, device: Device = None
) -> Float64[Tensor, " half"]:
    """The unscaled frequencies `theta ** (-2i / dim)` of RoFormer (arXiv:2104.09864), in float64.

    Examples:
        >>> plain_frequencies(4, 100.0)
        tensor([1.0000, 0.1000], dtype=torch.float64)
    """
    fractions = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    return torch.pow(float(theta), -fractions)


def require_positive(owner: str, **values: Any) -> None:
    """Raise TypeError or ValueError unless every value is a finite number above 0."""
    for name, value in values.items():
        _require_number(owner, name, value)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{owner}: {name} must be finite and greater than 0, got {value!r}")


def given(**optional: Any) -> dict[str, Any]:
    """The numbers that are not None."""
    return {name: value for name, value in optional.items() if value is not None}


def require_finite(owner: str, **values: Any) -> None:
    """Raise TypeError or ValueError unless every value is a finite number."""
    for name, value in values.items():
        _require_number(owner, name, value)
        if not math.isfinite(value):
            raise ValueError(f"{owner}: {name} must be finite, got {value!r}")


def _require_number(owner: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r}")
