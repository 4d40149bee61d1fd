"""Bytes that tensor parallelism sends, from shapes alone."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.distributed.ranks import sum_bytes
from regard.distributed.tensor.heads import HeadLayout
from regard.layers.attention import Attention
from regard.layers.latent import MultiHeadLatentAttention
from regard.layers.latent_kv import LatentKVAttention
from regard.ops.bias import RelativeBias


class Bytes(NamedTuple):
    """Bytes that each rank sends for one call of a tensor-parallel layer.

    Examples:
        >>> from regard import GroupedQueryAttention
        >>> from regard.distributed.tensor.sent import Bytes, bytes_sent
        >>> layer = GroupedQueryAttention(64, 8, 2)
        >>> bytes_sent(layer, ranks=2, batch=1, length=3) == Bytes(forward=768, backward=768)
        True
    """

    forward: int
    backward: int


class Sum(NamedTuple):
    """A sum over ranks: elements of the tensor, and the number of ranks."""

    elements: int
    ranks: int


def bytes_sent(
    layer: Any,
    *,
    ranks: int,
    batch: int,
    length: int,
    context_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Bytes:
    """Bytes that each rank sends for one call of a layer that is split over `ranks`.

    The forward pass sends the sum of the outputs, `[B, L, hidden_size]`, and for a norm over all
    heads the sums of squares. The backward pass, here of a step in which everything is trained,
    sends the gradients of what ranks read for their own heads: the input or the latents, and small
    parameters. Sums are sent in float32, or float64. A sum of n bytes sends `2 (ranks - 1) / ranks`
    times n from each rank.

    Args:
        layer: one of regard's, split or not.
        ranks: the number of ranks.
        batch: batch size.
        length: tokens of the input.
        context_length: tokens of the context of cross-attention; None without one.
        dtype: of the input and the weights.

    Examples:
        >>> from regard import GroupedQueryAttention
        >>> from regard.distributed.tensor.sent import bytes_sent
        >>> bytes_sent(GroupedQueryAttention(64, 8, 2), ranks=4, batch=1, length=3).forward
        1152
    """
    keys = length if context_length is None else context_length
    read = [Sum(elements, ranks) for elements in _read(layer, batch * length)]
    if context_length is not None:
        read.append(Sum(batch * keys * layer.context_size, ranks))
    squares = _squares(layer, ranks, batch, length, keys)
    output = Sum(batch * length * layer.hidden_size, ranks)
    return Bytes(
        _total([output, *squares], dtype),
        _total([*read, *squares, *_parameters(layer, ranks)], dtype),
    )


def bytes_forward(
    layer: Any, ranks: int, batch: int, length: int, keys: int, dtype: torch.dtype
) -> int:
    """Bytes that each rank sends in the forward pass; `keys` are those that are projected."""
    output = Sum(batch * length * layer.hidden_size, ranks)
    return _total([output, *_squares(layer, ranks, batch, length, keys)], dtype)


def _total(sums: list[Sum], dtype: torch.dtype) -> int:
    item = max(4, dtype.itemsize)
    return sum(sum_bytes(each.elements * item, each.ranks) for each in sums)


def _squares(layer: Any, ranks: int, batch: int, length: int, keys: int) -> list[Sum]:
    """The sums of squares of a norm over all heads, of queries and of keys."""
    if not getattr(layer, "norm_width", False):
        return []
    return [Sum(batch * tokens, ranks) for tokens in (length, keys) if tokens]


def _read(layer: Any, tokens: int) -> list[int]:
    """Elements of the activations that ranks read for their own heads."""
    if isinstance(layer, MultiHeadLatentAttention):
        joined = layer.kv_lora_rank + layer.qk_rope_head_dim
        low = layer.hidden_size if layer.q_lora_rank is None else layer.q_lora_rank
        return [tokens * joined, tokens * low]
    if isinstance(layer, LatentKVAttention):
        return [tokens * layer.kv_lora_rank, tokens * layer.hidden_size]
    assert isinstance(layer, Attention)
    inputs = 1 if layer.gate_proj is None else 2
    return [tokens * layer.hidden_size] * inputs


def _parameters(layer: Any, ranks: int) -> Iterator[Sum]:
    """Parameters that several ranks read for their own heads."""
    if getattr(layer, "q_norm", None) is not None and not layer.norm_width:
        for norm in (layer.q_norm, layer.k_norm):
            yield from (Sum(each.numel(), ranks) for each in norm.parameters())
    if isinstance(layer.score_bias, RelativeBias):
        yield Sum(layer.score_bias.relative_attention_bias.weight.numel(), ranks)
    if isinstance(layer.score_bias, Tensor) and layer.score_bias.requires_grad:
        yield Sum(layer.score_bias.numel(), ranks)
    if not isinstance(layer, MultiHeadLatentAttention):
        yield from _of_keys(layer, ranks)


def _of_keys(layer: Any, ranks: int) -> Iterator[Sum]:
    """Weights, biases and norms of key heads that several ranks have."""
    replicas = HeadLayout(layer.num_heads, layer.num_kv_heads, ranks).replicas
    if replicas == 1:
        return
    for name in ("k_proj", "v_proj", "kv_b_proj"):
        linear = getattr(layer, name, None)
        if isinstance(linear, nn.Linear):
            rows = linear.out_features // layer.num_kv_heads
            yield Sum(rows * linear.in_features, replicas)
            if linear.bias is not None:
                yield Sum(rows, replicas)
    if layer.norm_width:
        yield Sum(layer.head_dim, replicas)
