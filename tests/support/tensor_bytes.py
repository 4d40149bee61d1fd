"""The bytes of one call of a tensor-parallel layer, as `regard.plan.sent` counts them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.bias import RelativeBias
from regard.plan.modules import shape_of
from regard.plan.sent import backward_sums, forward_sums, sum_sent
from regard.plan.shapes import Workload


class Bytes(NamedTuple):
    """Bytes that each rank sends."""

    forward: int
    backward: int


def bytes_sent(layer, *, ranks, batch, length, context_length=None, dtype=torch.float32):
    """Also for what a shape does not have: contexts, and biases of scores and of norms."""
    keys = length if context_length is None else context_length
    work, shape = _workload(ranks, batch, length, dtype), shape_of(layer)
    read, key_channels = _others(layer), None
    if context_length is not None:
        key_channels = layer.context_size
        read.append(batch * keys * key_channels)
    backward = backward_sums(shape, work, keys, key_channels)
    backward += sum(sum_sent(elements, ranks, dtype.itemsize) for elements in read)
    return Bytes(forward_sums(shape, work, length, keys), backward)


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
