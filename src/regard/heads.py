"""Reshapes of heads: split from the hidden size, merged, grouped by key head, folded into rows.

Letters of shapes, in all of regard: B batch, L queries, S keys, H query heads, G key/value heads,
D head dim, Dv value head dim, E hidden size, R latent rank.
"""

from jaxtyping import Shaped
from torch import Tensor

_ROTARY = 0.25  # share of a cache that the rotary key gets: with more or less, outputs err more


def split_heads(x: Shaped[Tensor, "B L HD"], head_dim: int) -> Shaped[Tensor, "B H L D"]:
    """Split the last dimension into heads of `head_dim` channels.

    Examples:
        >>> import torch
        >>> split_heads(torch.zeros(2, 5, 12), 4).shape
        torch.Size([2, 3, 5, 4])
    """
    batch, length, width = x.shape
    return x.view(batch, length, width // head_dim, head_dim).transpose(1, 2)


def merge_heads(x: Shaped[Tensor, "B H L D"]) -> Shaped[Tensor, "B L HD"]:
    """Concatenate the heads: the inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(-2)


def group_heads(x: Shaped[Tensor, "B H L X"], num_kv_heads: int) -> Shaped[Tensor, "B G N L X"]:
    """Group query heads by key head, so that keys `[B, G, 1, S, D]` broadcast over each group.

    Query head `h` uses key head `h // (H // G)`.
    """
    return x.unflatten(1, (num_kv_heads, x.shape[1] // num_kv_heads))


def ungroup_heads(x: Shaped[Tensor, "B G N L X"]) -> Shaped[Tensor, "B H L X"]:
    """The inverse of `group_heads`."""
    return x.flatten(1, 2)


def fold_heads(x: Shaped[Tensor, "B H L X"], num_kv_heads: int) -> Shaped[Tensor, "B G M X"]:
    """Stack the query heads of a group as rows (M = H/G * L), so that its keys are read once."""
    batch, heads, queries, width = x.shape
    return x.reshape(batch, num_kv_heads, heads // num_kv_heads * queries, width)


def unfold_heads(x: Shaped[Tensor, "B G M X"], num_queries: int) -> Shaped[Tensor, "B H L X"]:
    """The inverse of `fold_heads`."""
    batch, groups, rows, width = x.shape
    return x.reshape(batch, groups * (rows // num_queries), num_queries, width)


def shared_rotary_dim(elements: float | int, rope_dim: int, num_kv_heads: int) -> int:
    """Channels of the rotary key that all heads share, if GQA becomes DeepSeek's MLA.

    `_ROTARY` of the cache, at most half as many again as the `rope_dim` of a head, and no more than
    all heads have. Kernels take multiples of 8.

    Args:
        elements: of the cache of the MLA, per token.

    Examples:
        >>> shared_rotary_dim(1024, 128, 8), shared_rotary_dim(512, 128, 8)
        (192, 128)
    """
    wanted = min(int(_ROTARY * elements), rope_dim * 3 // 2, num_kv_heads * rope_dim)
    return max(2, wanted // 8 * 8 or wanted // 2 * 2)
