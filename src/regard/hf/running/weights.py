"""Products of few tokens with the weights of a model's linear layers, by compiled code.

A decoding step reads each weight once, and most of its time is this reading. Torch's kernels of
matrix products read at half to a third of the memory's bandwidth where there are few rows.
"""

import functools
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from regard.hf.running.binding import bind, function_of
from regard.matrices import same_product
from regard.tracing import is_immediate

SMALLEST = 1 << 16  # weights of a layer, at least: a product with fewer takes torch as long as the
# Python around the compiled code


def bind_weights(model: nn.Module) -> int:
    """Bind `forward` to the plain linear layers of a model, and return how many have it."""
    if find_spec("numba") is None:  # the extra "cpu"
        return 0
    layers = [each for each in model.modules() if _is_plain(each)]
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
    """The forward of the layer's class; of `nn.Linear`, of at most 8 rows on a CPU and without
    gradients, by `linear`. Tensor parallelism and parametrisations change the class."""
    if type(self) is nn.Linear:
        weight, bias = self.weight, self.bias
        if _gains(weight.dtype) and _runs_now(input, weight, bias):
            from regard.ops.kernels.linear import linear  # imports numba

            out = linear(input, weight, bias)
            if out is not None:
                return out
    return type(self).forward(self, input)


@functools.cache
def _gains(dtype: torch.dtype) -> bool:
    """Whether the compiled code is quicker than torch's kernels on this processor.

    Of bfloat16 it is on AVX2 alone: torch has other kernels for it with AVX-512 and on Arm, beside
    which it was not measured.
    """
    from regard.ops.kernels.intrinsics import machine_lanes  # imports numba

    return dtype is torch.float32 or (dtype is torch.bfloat16 and machine_lanes() == 8)


def _runs_now(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether nothing traces or transforms the product, wants its gradient, or casts for it."""
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if not is_immediate(*tensors) or torch._C._is_any_autocast_enabled():
        return False
    return not torch.is_grad_enabled() or not any(each.requires_grad for each in tensors)
