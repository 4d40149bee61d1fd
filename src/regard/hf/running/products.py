"""Products with the weights of a model's linear layers where torch's kernels are slow.

A decoding step reads each weight once, and most of its time is this reading. Torch's kernels of
matrix products read at half to a third of the memory's bandwidth where there are few rows. In half
precision, on a processor without instructions for it, they take up to seven times as long as in
float32, however many rows there are.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.hf.running.binding import bind, function_of
from regard.matrices import MOST_ROWS, same_product
from regard.ops.backends.fused import is_installed
from regard.tracing import is_immediate

SMALLEST = 1 << 16  # weights of a layer, at least: a product with fewer takes torch as long as the
# Python around the compiled code
HALVES = torch.bfloat16, torch.float16
WIDENED = 1 << 24  # weights, at most, that are float32 at a time: 64 MiB


def bind_linear(model: nn.Module) -> int:
    """Bind `forward` to the plain linear layers of a model, and return how many have it."""
    layers = [each for each in model.modules() if _is_plain(each)] if is_installed() else []
    for layer in layers:
        bind(layer, forward)
    return len(layers)


def _is_plain(layer: nn.Module) -> bool:
    if type(layer) is not nn.Linear:
        return False
    if not layer.weight.is_cpu or layer.weight.numel() < SMALLEST:
        return False
    return "forward" not in vars(layer) or function_of(layer, "forward") is forward


@same_product
def forward(self: Any, input: Tensor) -> Tensor:
    """The forward of the layer's class, which tensor parallelism and parametrisations change; of
    `nn.Linear`, on a CPU and without gradients, quicker."""
    if type(self) is nn.Linear:
        weight, bias = self.weight, self.bias
        if gains(weight.dtype) and _runs_now(input, weight, bias):
            from regard.ops.kernels.chaining import linear  # imports numba

            out = linear(input, weight, bias)
            if out is not None:
                return out
            if _is_slow(input, weight, bias):
                return in_float32(input, weight, bias)
    return type(self).forward(self, input)


def in_float32(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of half-precision numbers, computed in float32 and rounded once: for some outputs
    at a time, so that few weights are widened at once."""
    wide, out = input.float(), input.new_empty((*input.shape[:-1], len(weight)))
    count = max(1, WIDENED // max(1, weight.shape[1]))
    for first in range(0, len(weight), count):
        part = slice(first, first + count)
        added = None if bias is None else bias[part].float()
        out[..., part] = functional.linear(wide, weight[part].float(), added)
    return out


@functools.cache
def gains(dtype: torch.dtype) -> bool:
    """Whether this module's products are quicker than torch's kernels on this processor: not
    without numba, which may be missing where a pickled model is read. In half precision they are on
    AVX2 alone: torch has other kernels with AVX-512 and on Arm, beside which none was measured."""
    if not is_installed():
        return False
    from regard.ops.kernels.intrinsics import machine_lanes  # imports numba

    return dtype is torch.float32 or (dtype in HALVES and machine_lanes() == 8)


def _is_slow(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether torch multiplies many rows in half precision."""
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if weight.dtype not in HALVES or input.numel() <= MOST_ROWS * weight.shape[-1]:
        return False
    return all(each.is_cpu and each.dtype is weight.dtype for each in tensors)


def _runs_now(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether nothing traces or transforms the product, wants its gradient, or casts for it."""
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if not is_immediate(*tensors) or torch._C._is_any_autocast_enabled():
        return False
    return not torch.is_grad_enabled() or not any(each.requires_grad for each in tensors)
