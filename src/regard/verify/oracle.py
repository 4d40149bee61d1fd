"""The judge: attention in float64 from its definition, written for this suite alone.

It shares nothing with what regard runs. Its options are the mistakes people make: with them, it
says which mistake would give the numbers that came.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Judged(NamedTuple):
    """`out` [B, H, L, Dv], `weights` [B, H, L, S], and S of the error bound."""

    out: Tensor
    weights: Tensor
    largest: float


def attention(
    q: Float[Tensor, "B H L D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S V"],
    *,
    keep: Bool[Tensor, "#B #H L S"] | None = None,
    scale: float | None = None,
    bias: Float[Tensor, "#B #H L S"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    tiled: bool = False,
) -> Judged:
    """Attend q [B, H, L, D] to k [B, G, S, D] and v [B, G, S, Dv]; a row that sees nothing is 0."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = _one_for_each(k, q.shape[1], tiled), _one_for_each(v, q.shape[1], tiled)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * factor
    sizes = torch.einsum("bhid,bhjd->bhij", q.abs(), k.abs()) * abs(factor)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores, sizes = scores + bias.double(), sizes + bias.double().abs()
    weights = softmax(scores, keep, sinks)
    shown = sizes if keep is None else torch.where(keep.expand_as(sizes), sizes, 0.0)
    largest = float(shown.detach().max()) if shown.numel() else 0.0
    return Judged(torch.einsum("bhij,bhjd->bhid", weights, v), weights, largest)


def softmax(scores: Tensor, keep: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Shares of the visible scores; hidden ones exactly 0, and no NaN in its gradient."""
    if scores.numel() == 0:
        return scores
    seen = torch.ones_like(scores, dtype=torch.bool) if keep is None else keep.expand_as(scores)
    top = torch.where(seen, scores, float("-inf")).amax(-1, keepdim=True)
    column = None if sinks is None else sinks.double()[:, None, None]
    if column is not None:
        top = torch.maximum(top, column.expand_as(top))
    top = torch.where(top.isinf(), 0.0, top).detach()
    powers = torch.where(seen, torch.exp(torch.where(seen, scores, top) - top), 0.0)
    total = powers.sum(-1, keepdim=True)
    if column is not None:
        total = total + torch.exp(column - top)
    return powers / torch.where(total == 0, 1.0, total)


def _one_for_each(x: Tensor, heads: int, tiled: bool) -> Tensor:
    """Key heads repeated until there is one for each query head."""
    if x.shape[1] == 0 or x.shape[1] == heads:
        return x
    groups = x.shape[1]
    order = [h % groups if tiled else h * groups // heads for h in range(heads)]
    return x[:, order]


def rotated(
    x: Float[Tensor, "B H L D"],
    positions: Int[Tensor, " L"],
    pairing: str,
    theta: float = 10_000.0,
) -> Float[Tensor, "B H L D"]:
    """RoPE as complex numbers (arXiv:2104.09864): x [B, H, L, D] turned by `positions` [L]."""
    if pairing == "none":
        return x
    x = x.double()
    dim = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = positions.double()[:, None] * frequencies
    spin = torch.polar(torch.ones_like(angles), angles)
    if pairing == "pairs":
        turned = torch.complex(x[..., 0::2], x[..., 1::2]) * spin
        return torch.stack([turned.real, turned.imag], -1).flatten(-2)
    turned = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * spin
    return torch.cat([turned.real, turned.imag], -1)


def pattern(
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    window: int = 0,
    alignment: str = "bottom-right",
) -> Bool[Tensor, "queries keys"]:
    """Which key [L, S] a query may see.

    >>> pattern(1, 3, causal=True, window=2).tolist()
    [[False, True, True]]
    """
    past = keys - queries if alignment == "bottom-right" else 0
    i = torch.arange(queries)[:, None] + past
    j = torch.arange(keys)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen = seen & (j <= i)
    if window:
        seen = seen & (j > i - window)
    return seen


def bound(
    judged: Judged, v: Float[Tensor, "..."], dtype: torch.dtype, factor: float = 4.0
) -> float:
    """How far a sound implementation may be off: `factor` u vmax (1 + S)."""
    u = torch.finfo(dtype).eps / 2
    vmax = float(v.detach().abs().max()) if v.numel() else 0.0
    return factor * u * vmax * (1 + judged.largest)


def variants(q: Tensor, v: Tensor, width: int) -> dict[str, dict[str, Any]]:
    """Mistakes of the scale and the heads, in words: options of `attention` that make them."""
    dim, right = q.shape[-1], q.shape[-1] ** -0.5
    return {
        "the scores are not scaled": {"scale": 1.0},
        f"the scores are scaled by 1/{dim}, the head size without its root": {"scale": 1 / dim},
        "the scores are scaled twice": {"scale": right * right * (1 + 1e-15)},
        f"the scores are scaled by the root of the width, 1/sqrt({width})": {"scale": width**-0.5},
        "the scores are multiplied by the root where they should be divided": {"scale": dim**0.5},
        f"the scores are scaled by the value size, 1/sqrt({v.shape[-1]})": {
            "scale": v.shape[-1] ** -0.5
        },
        "the scores are scaled by the number of heads": {"scale": q.shape[1] ** -0.5},
        "the number of keys scales the scores": {"scale": max(v.shape[2], 1) ** -0.5},
        "query head h reads key head h % G, it must read h // (H / G)": {"tiled": True},
    }
