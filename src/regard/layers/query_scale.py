"""Queries scaled by their positions, so that attention stays sharp in long contexts."""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from regard.words import code_of


@runtime_checkable
class QueryScale(Protocol):
    """The protocol of a layer's `query_scale=`: `UNSCALED`, `PositionScale`, or your own.

    Examples:
        >>> from regard import PositionScale
        >>> from regard.layers.query_scale import UNSCALED, QueryScale
        >>> isinstance(UNSCALED, QueryScale), isinstance(PositionScale(0.1, 8192), QueryScale)
        (True, True)
    """

    def __call__(
        self, q: Float[Tensor, "B H L D"], positions: Shaped[Tensor, "*B L"]
    ) -> Float[Tensor, "B H L D"]:
        """Scale queries at `positions`, `[L]` or `[B, L]`."""


class Unscaled:
    """The neutral scale of queries, `UNSCALED`."""

    def __call__(
        self, q: Float[Tensor, "B H L D"], positions: Shaped[Tensor, "*B L"]
    ) -> Float[Tensor, "B H L D"]:
        """Return `q`."""
        return q

    def __repr__(self) -> str:
        return "UNSCALED"

    def __reduce__(self) -> str:
        return "UNSCALED"  # copies and unpickled ones are the same object


UNSCALED = Unscaled()


@dataclass(frozen=True, repr=False)
class PositionScale:
    """Queries times `1 + beta * log(1 + floor((position + offset) / original_max_position))`.

    Queries within the context of training keep their length; later ones grow with the logarithm of
    the position, against the flattening of the softmax over many keys (Nakanishi 2025,
    arXiv:2501.19399). Ministral 3 and Mistral 4 scale so in every layer; Llama 4 in its layers
    without RoPE, with `offset=1`. The factor is computed in float32, for float64 queries in
    float64, and keys are not changed: a cache holds the same with and without it.

    Args:
        beta: the growth: `llama_4_scaling_beta`, or Llama 4's `attn_scale`.
        original_max_position: positions of one step: `original_max_position_embeddings`, or Llama
            4's `floor_scale`.
        offset: added to the positions, which count from 0.

    Raises:
        ValueError: if `beta` is not finite, or `original_max_position` not above 0.

    Examples:
        >>> import torch
        >>> from regard import Attention, Causal, PositionScale, Rotary
        >>> scale = PositionScale(0.1, original_max_position=8192)
        >>> [round(factor, 4) for factor in scale.factors(torch.tensor([8191, 8192])).tolist()]
        [1.0, 1.0693]
        >>> layer = Attention(64, 8, rope=Rotary(8), mask=Causal(), query_scale=scale)
        >>> layer(torch.randn(1, 5, 64)).shape
        torch.Size([1, 5, 64])
    """

    beta: int | float
    original_max_position: int | float
    offset: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.beta) and self.original_max_position > 0):
            raise ValueError(
                "PositionScale: beta is finite and original_max_position above 0, got "
                f"{self.beta!r} and {self.original_max_position!r}"
            )

    def factors(
        self, positions: Shaped[Tensor, "*B L"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*B L"]:
        """The factor of the query at each position."""
        steps = ((positions.to(dtype) + self.offset) / self.original_max_position).floor()
        return 1 + self.beta * steps.clamp_min(0).log1p()  # padding may have positions below 0

    def __call__(
        self, q: Float[Tensor, "B H L D"], positions: Shaped[Tensor, "*B L"]
    ) -> Float[Tensor, "B H L D"]:
        """Scale queries at `positions`, `[L]` or `[B, L]`."""
        wide = torch.float64 if q.dtype is torch.float64 else torch.float32
        factors = self.factors(positions, wide)[..., None, :, None]  # [1 or B, 1, L, 1]
        return (q * factors).to(q.dtype)

    def __repr__(self) -> str:
        return code_of(self, 2)


def check_query_scale(scale: object) -> None:
    """Refuse a `query_scale` that is no function of queries and positions, such as a number."""
    if isinstance(scale, type) or not isinstance(scale, QueryScale):
        raise TypeError(
            "query_scale is UNSCALED, PositionScale(beta, original_max_position) or a function of "
            f"queries and positions, got {scale!r}; scale= is a number for all positions"
        )
