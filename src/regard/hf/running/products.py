"""Products with the weights of a model's linear layers where torch's kernels are slow.

A decoding step reads each weight once, and most of its time is this reading. Torch's kernels of
matrix products read at half to a third of the memory's bandwidth where there are few rows. In half
precision, on a processor without instructions for it, they take up to seven times as long as in
float32 where there are many; in float32, twice as long as oneDNN's on a processor of AMD.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mkldnn
from torch.nn import functional

from regard.hf.running.binding import bind, function_of
from regard.matrices import MOST_ROWS, same_product
from regard.ops.backends.fused import is_installed
from regard.rates import is_made_by
from regard.tracing import is_immediate

SMALLEST = 1 << 16  # weights of a layer, at least: a product with fewer takes torch as long as the
# Python around the compiled code
HALVES = torch.bfloat16, torch.float16
WIDE, WIDE_ROWS = 1024, 4  # elements: a longer row is wide; so many, at most, beside torch's AMX
WIDENED = 1 << 24  # weights, at most, that are float32 at a time: 64 MiB
LARGE = 1 << 18  # weights, at least: with fewer, oneDNN prepares for longer than it gains


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
        tensors = (input, weight) if bias is None else (input, weight, bias)
        if _runs_now(tensors):
            if 0 < input.numel() <= most_rows(weight.dtype, width := weight.shape[-1]) * width:
                from regard.ops.kernels.chaining import linear  # imports numba

                if (out := linear(input, weight, bias)) is not None:
                    return out
            if is_emulated(weight.dtype) and _are_many(tensors):
                return in_float32(input, weight, bias)
            if suits_onednn(weight) and _are_many(tensors) and _fit(tensors):
                return by_onednn(input, weight, bias)
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


def by_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of float32 numbers by oneDNN, which torch itself calls in compiled graphs."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return out


def suits_onednn(weight: Tensor) -> bool:
    """Whether oneDNN multiplies many rows by a weight in less time than torch: on others than AMD's
    processors the two were not compared."""
    if weight.dtype is not torch.float32 or weight.numel() < LARGE:
        return False
    return is_made_by("AuthenticAMD") and mkldnn.is_available() and bool(mkldnn.enabled)


@functools.cache
def most_rows(dtype: torch.dtype, width: int) -> int:
    """Rows of so many elements that compiled code multiplies in less time than torch; with AMX
    torch multiplies many wide ones sooner. In bfloat16, only x86 was measured."""
    lanes, features = _machine()
    if dtype is torch.float32:
        return MOST_ROWS if is_installed() else 0
    if dtype is not torch.bfloat16 or lanes < 8:
        return 0
    return WIDE_ROWS if width > WIDE and "+amx-bf16" in features else MOST_ROWS


@functools.cache
def is_emulated(dtype: torch.dtype) -> bool:
    """Whether torch's products of many rows are slow in a dtype, for which this processor has no
    instruction: with AVX2 half precision, with AVX-512 float16 alone."""
    lanes, features = _machine()
    if lanes == 16:
        return dtype is torch.float16 and "+avx512fp16" not in features
    return lanes == 8 and dtype in HALVES


def _are_many(tensors: tuple[Tensor, ...]) -> bool:
    """Whether rows are many, and all tensors of a product on the CPU and of one dtype."""
    input, weight, *_ = tensors
    few = input.numel() <= MOST_ROWS * weight.shape[-1]
    return not few and all(each.is_cpu and each.dtype is weight.dtype for each in tensors)


def _fit(tensors: tuple[Tensor, ...]) -> bool:
    """Whether rows are as wide as the weight, and a bias lies in one piece, as oneDNN reads it."""
    input, weight, *rest = tensors
    return input.shape[-1] == weight.shape[1] and all(each.is_contiguous() for each in rest)


def _runs_now(tensors: tuple[Tensor, ...]) -> bool:
    """Whether nothing traces or transforms a product, wants its gradient, or casts for it."""
    if not is_immediate(*tensors) or torch._C._is_any_autocast_enabled():
        return False
    return not torch.is_grad_enabled() or not any(each.requires_grad for each in tensors)


def _machine() -> tuple[int, set[str]]:
    """The lanes of a vector of this processor, and LLVM's names of its features; no lanes without
    numba, which may be missing where a pickled model is read."""
    if not is_installed():
        return 0, set()
    from regard.ops.kernels import vectors  # imports numba

    return vectors.machine_lanes(), vectors.machine_features()
