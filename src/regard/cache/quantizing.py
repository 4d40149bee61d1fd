"""Quantising new tokens: in one pass over them where numba is installed, else by torch's operators.

A step appends few numbers, so that starting a dozen operators takes far longer than their work.
"""

import functools
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor

from regard.cache.codes import bytes_of, quantize
from regard.cache.rotation import hadamard
from regard.tracing import is_immediate

MOST = 1 << 15  # numbers; more are quantised as quickly by torch's operators, on all threads


def quantized(
    x: Float[Tensor, "*B L W"], bits: int, group: int, rotation: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Codes, and a scale and a zero for each group of channels: the result of `codes.quantize`.

    Blocks of channels of the widths in `rotation` are rotated first, in float32.
    """
    if rotation and x.numel():  # a file of no tokens may claim a width too large for a matrix
        x = hadamard(x.detach().float(), rotation)
    if not (x.is_cpu and 0 < x.numel() <= MOST and is_immediate(x) and has_numba()):
        return quantize(x, bits, group)
    from regard.cache.quantizing_kernel import kernel  # here, because it imports numba

    x = x.detach().float().resolve_neg().contiguous()
    *rows, width = x.shape
    codes = torch.empty(*rows, bytes_of(width, bits), dtype=torch.uint8, device="cpu")
    scales = torch.empty(*rows, 2 * -(-width // group), dtype=torch.bfloat16, device="cpu")
    places = x.data_ptr(), codes.data_ptr(), scales.data_ptr()
    kernel(bits, group)(*places, x.numel() // width, width)
    return codes, scales


@functools.cache
def has_numba() -> bool:
    return find_spec("numba") is not None
