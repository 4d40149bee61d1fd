"""Bytes that tensor parallelism sends for a call of a layer: the counts of `regard.plan.sent`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.bias import RelativeBias
from regard.plan.modules import shape_of
from regard.plan.sent import backward_sums, forward_sums, sum_sent
from regard.plan.shapes import Workload


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

    As `regard.plan.sent_of`, and for what a shape does not have: the context of cross-attention,
    biases of scores and of norms. In the backward pass everything is trained.

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
    work, shape = _workload(ranks, batch, length, dtype), shape_of(layer)
    read, key_channels = _others(layer), None
    if context_length is not None:
        key_channels = layer.context_size
        read.append(batch * keys * key_channels)
    backward = backward_sums(shape, work, keys, key_channels)
    backward += sum(sum_sent(elements, ranks, dtype.itemsize) for elements in read)
    return Bytes(forward_sums(shape, work, length, keys), backward)


def bytes_forward(
    layer: Any, ranks: int, batch: int, length: int, keys: int, dtype: torch.dtype
) -> int:
    """Bytes that each rank sends in the forward pass; `keys` are those that are projected."""
    work = _workload(ranks, batch, length, dtype)
    return forward_sums(shape_of(layer), work, length, keys)


def _workload(ranks: int, batch: int, length: int, dtype: torch.dtype) -> Workload:
    name = str(dtype).removeprefix("torch.")
    return Workload(context=length, batch=batch, dtype=name, tp=ranks)


def _others(layer: Any) -> list[int]:
    """Elements of parameters that every rank reads for its own heads and that no shape has: biases
    of scores, and of norms of heads."""
    bias, elements = layer.score_bias, []
    if isinstance(bias, RelativeBias):
        elements.append(bias.relative_attention_bias.weight.numel())
    if isinstance(bias, Tensor) and bias.requires_grad:
        elements.append(bias.numel())
    if not getattr(layer, "norm_width", True):
        norms = (each for each in (layer.q_norm, layer.k_norm) if each is not None)
        parameters = (each for norm in norms for each in norm.named_parameters())
        elements += [each.numel() for name, each in parameters if name != "weight"]
    return elements
