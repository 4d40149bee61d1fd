"""The reference: attention in float64 from its definition, written for this suite alone.

It shares no code with the attention of this library. Its options include common mistakes, so that
the report can say which mistake would give the values that were returned.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Reference(NamedTuple):
    """`out` [B, H, L, Dv], `weights` [B, H, L, S], and `largest`: the S of the error bound."""

    out: Tensor
    weights: Tensor
    largest: float


def attention(
    q: Tensor,  # [B, H, L, D]
    k: Tensor,  # [B, G, S, D]
    v: Tensor,  # [B, G, S, V]
    *,
    keep: Tensor | None = None,  # [#B, #H, L, S]
    scale: float | None = None,
    bias: Tensor | None = None,  # [#B, #H, L, S]
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [H]
    tiled: bool = False,
) -> Reference:
    """Attention of q [B, H, L, D] to k [B, G, S, D], v [B, G, S, Dv]; fully masked rows are 0."""
    q, k, v = q.double(), k.double(), v.double()
    heads, groups = q.shape[1], k.shape[1]
    if groups not in (0, heads):
        k, v = (x[:, key_heads(heads, groups, tiled)] for x in (k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * factor
    sizes = torch.einsum("bhid,bhjd->bhij", q.abs(), k.abs()) * abs(factor)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores, sizes = scores + bias.double(), sizes + bias.double().abs()
    weights = softmax(scores, keep, sinks)
    visible = sizes if keep is None else torch.where(keep.expand_as(sizes), sizes, 0.0)
    largest = float(visible.detach().max()) if visible.numel() else 0.0
    return Reference(torch.einsum("bhij,bhjd->bhid", weights, v), weights, largest)


def softmax(scores: Tensor, keep: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the visible scores; hidden ones get exactly 0, and gradients without NaN."""
    if scores.numel() == 0:
        return scores
    visible = torch.ones_like(scores, dtype=torch.bool) if keep is None else keep.expand_as(scores)
    top = torch.where(visible, scores, float("-inf")).amax(-1, keepdim=True)
    column = None if sinks is None else sinks.double()[:, None, None]
    if column is not None:
        top = torch.maximum(top, column.expand_as(top))
    top = torch.where(top.isinf(), 0.0, top).detach()
    powers = torch.where(visible, torch.exp(torch.where(visible, scores, top) - top), 0.0)
    total = powers.sum(-1, keepdim=True)
    if column is not None:
        total = total + torch.exp(column - top)
    return powers / torch.where(total == 0, 1.0, total)


def key_heads(heads: int, groups: int, tiled: bool = False) -> list[int]:
    """The key head that each query head reads: neighbours share one, or heads are tiled.

    Examples:
        >>> key_heads(4, 2), key_heads(4, 2, tiled=True)
        ([0, 0, 1, 1], [0, 1, 0, 1])
    """
    return [h % groups if tiled else h * groups // heads for h in range(heads)]


def rotated(
    x: Tensor,  # [B, H, L, D]
    positions: Tensor,  # [L]
    pairing: str,
    theta: float = 10_000.0,
) -> Tensor:
    """RoPE in complex numbers (arXiv:2104.09864): x [B, H, L, D] rotated by `positions` [L]."""
    if pairing == "none":
        return x
    x = x.double()
    dim = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = positions.double()[:, None] * frequencies
    rotation = torch.polar(torch.ones_like(angles), angles)
    if pairing == "pairs":
        out = torch.complex(x[..., 0::2], x[..., 1::2]) * rotation
        return torch.stack([out.real, out.imag], -1).flatten(-2)
    out = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * rotation
    return torch.cat([out.real, out.imag], -1)


def pattern(
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    window: int = 0,
    after: int | None = None,
    alignment: str = "bottom-right",
    block: int = 0,
    blocks: tuple[int, int] = (0, 0),
) -> Tensor:
    """The keys that each query may attend to [L, S], by a causal rule, a window and blocks.

    Of the keys after its own a query sees `after`, or all where that is None and nothing is causal.
    With blocks of `block` tokens it sees its own, `blocks[0]` before and `blocks[1]` after.

    Examples:
        >>> pattern(1, 3, causal=True, window=2).tolist()
        [[False, True, True]]
    """
    first = keys - queries if alignment == "bottom-right" else 0
    i = torch.arange(queries)[:, None] + first
    j = torch.arange(keys)[None]
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        visible = visible & (j <= i)
    if window:
        visible = visible & (j > i - window)
    if after is not None:
        visible = visible & (j <= i + after)
    if block:
        distance = j // block - i // block
        visible = visible & (distance >= -blocks[0]) & (distance <= blocks[1])
    return visible


def bound(right: Reference, v: Tensor, dtype: torch.dtype) -> float:
    """The error that rounding explains: 4 u vmax (1 + S), u the unit roundoff of `dtype`."""
    u = torch.finfo(dtype).eps / 2
    vmax = float(v.detach().abs().max()) if v.numel() else 0.0
    return 4.0 * u * vmax * (1 + right.largest)


def wrong_scales(dim: int, width: int, keys: int) -> dict[str, float]:
    """Common mistakes of the scale for D channels of a head, E of the input and S keys."""
    return {
        "the scores are not scaled": 1.0,
        "the scores are divided by the head size without its root": 1 / dim,
        "the scores are scaled twice": 1 / dim * (1 + 1e-15),
        "the scores are multiplied by the root of the head size": dim**0.5,
        f"the scores are scaled by the root of the whole width {width}": width**-0.5,
        "the scores are scaled by the root of the number of keys": max(keys, 1) ** -0.5,
        "the scores have no effect": 0.0,
    }
