"""The bytes of one call of a tensor-parallel layer, as `regard.plan.sent` counts them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.bias import RelativeBias
from regard.plan.modules import shape_of
from regard.plan.sent import backward_sums, forward_sums, sum_sent
from regard.plan.shapes import Workload, replicas


class Bytes(NamedTuple):
    """Bytes that each rank sends."""

    forward: int
    backward: int


def bytes_sent(layer, *, ranks, batch, length, context_length=None, dtype=torch.float32):
    """Also for what a shape does not have: contexts, and biases of scores and of norms."""
    keys = length if context_length is None else context_length
    work, shape = _workload(ranks, batch, length, dtype), shape_of(layer)
    read = _others(layer)
    if context_length is not None:
        read.append(batch * keys * layer.context_size)
    backward = backward_sums(shape, work)
    backward += sum(sum_sent(elements, ranks, dtype.itemsize) for elements in read)
    of_context = 0
    if shape.qk_norm == "width":  # a sum of squares for each key, not for each query
        sums = (sum_sent(batch * tokens, ranks, dtype.itemsize) for tokens in (keys, length))
        of_context = next(sums) - next(sums)
    widths = () if context_length is None else (shape.head_dim, shape.v_head_dim)
    for width in widths:  # weights of key heads that several ranks have
        channels = (layer.context_size, shape.hidden_size)
        same = replicas(shape.num_kv_heads, ranks)
        sums = (sum_sent(width * each, same, dtype.itemsize) for each in channels)
        backward += next(sums) - next(sums)
    return Bytes(forward_sums(shape, work, length) + of_context, backward + of_context)


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
