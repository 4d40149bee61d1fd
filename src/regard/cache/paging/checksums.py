"""Digests of tensors, which are computed anew only once their bytes have changed.

A digest of a model takes as long as several of its decoding steps on a CPU, and seconds of a model
on a GPU, which computes the prefix of a text in less. So its device first computes two sums of 32
bits: a GPU at the rate of its memory, a CPU in code that numba compiles, in less time than a digest
(`benchmarks/full_pages.py`). Each is a multilinear hash with secret factors (Lemire and Kaser 2014,
arXiv:1202.4961), so that two tensors have the same sums with a probability of about 2**-60.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int32, Int64
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from regard.cache.quantizing import has_numba

LEAST = 1 << 16  # bytes of a tensor on a CPU whose sums are worth their calls
_ROW = 1 << 12  # numbers that are summed at a time
_PIECE = 1 << 24  # numbers whose products are in memory at a time: 128 MiB
_LOW = (1 << 32) - 1

Sums = tuple[int, int]

# Memo table: the sums of a tensor and its digest then.
_DIGESTS = WeakIdKeyDictionary()


def gains(tensor: Tensor) -> bool:
    """Whether sums of a tensor are quicker than its digest."""
    if tensor.device.type == "cuda":
        return True
    large = tensor.is_cpu and tensor.nbytes >= LEAST and type(tensor) in (Tensor, nn.Parameter)
    return large and has_numba()


def digest_once(tensor: Tensor, digest: Callable[[], bytes]) -> bytes:
    """`digest()` of a tensor, unless all its bytes are as at the last call."""
    sums = checksums(tensor)
    known: tuple[Sums, bytes] | None = _DIGESTS.get(tensor)
    if known is None or known[0] != sums:
        known = _DIGESTS[tensor] = sums, digest()
    return known[1]


def checksums(tensor: Tensor) -> Sums:
    """Two sums of the bytes of a tensor, computed on its device; they hold for this process.

    Examples:
        >>> x = torch.zeros(3)
        >>> before = checksums(x)
        >>> x.data[1] = -0.0
        >>> checksums(x) == before
        False
    """
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    raw = torch.nn.functional.pad(raw, (0, -len(raw) % 4)) if len(raw) % 4 else raw
    numbers, factors = raw.view(torch.int32), _factors(tensor.device)
    if numbers.is_cpu and has_numba():
        rows = _compiled_rows(numbers, factors)
    else:
        rows = [torch.cat([_rows(x, each) for x in numbers.split(_PIECE)]) for each in factors]
    one, other = map(_reduced, rows, factors)
    return int(one), int(other)


def _compiled_rows(numbers: Int32[Tensor, " n"], factors: Sequence[Tensor]) -> list[Tensor]:
    """The hashes of rows by both factors, in compiled code."""
    from regard.cache.paging.checksum_kernel import kernel  # imports numba

    out = torch.empty(2, -(-len(numbers) // _ROW), dtype=torch.int64, device="cpu")
    places = numbers.data_ptr(), *(each.data_ptr() for each in factors), out.data_ptr()
    kernel(_ROW)(*places, len(numbers))
    return [*out]


def _reduced(rows: Tensor, factors: Int64[Tensor, " row_and_1"]) -> Int64[Tensor, ""]:
    """The hash of the hashes of rows, until one is left."""
    while len(rows) > 1:
        rows = _rows(rows, factors)
    return rows.sum()  # of one number, or none


def _rows(numbers: Tensor, factors: Tensor) -> Int64[Tensor, " rows"]:
    wide = torch.nn.functional.pad(numbers.long() & _LOW, (0, -len(numbers) % _ROW))
    sums = (wide.view(-1, _ROW) * factors[1:]).sum(1) + factors[0]
    return (sums >> 32) & _LOW


@functools.cache
def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    """Secret factors of 64 bits, and a term in front of them, for both hashes."""
    drawn, (low, high) = torch.Generator(), (-(1 << 63), (1 << 63) - 1)
    drawn.seed()
    one, other = (torch.randint(low, high, (_ROW + 1,), generator=drawn) for _ in range(2))
    return one.to(device), other.to(device)
