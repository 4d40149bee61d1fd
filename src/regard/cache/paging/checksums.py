"""Digests of tensors, which are computed anew only once their bytes have changed.

A digest of a model takes as long as several of its decoding steps on a CPU, and seconds of a model
on a GPU, which computes the prefix of a text in less. So its device first hashes rows of its
numbers: a GPU at the rate of its memory, a CPU in code that numba compiles, at nearly that rate
(`benchmarks/full_pages.py`). The hash is UMAC's NH (Black et al. 1999, "UMAC: Fast and Secure
Message Authentication"), with two secret keys, so that different rows have the same two hashes with
a probability of 2**-64.
"""

import functools
import hashlib
from collections.abc import Callable

import torch
from jaxtyping import Int32, Int64
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from regard.cache.files import memory_of
from regard.cache.quantizing import has_numba

LEAST = 1 << 16  # bytes of a tensor on a CPU whose hashes are worth their calls
_HALF = 1 << 11  # numbers of half a row: each is multiplied with one of the other half
_PIECE = 1 << 24  # numbers whose products are in memory at a time: 128 MiB
_ROW = 4 * 2 * _HALF  # bytes
_LOW = (1 << 32) - 1

# Memo table: the checksum of a tensor and its digest then.
_DIGESTS = WeakIdKeyDictionary()


def gains(tensor: Tensor) -> bool:
    """Whether the checksum of a tensor is quicker than its digest."""
    if tensor.device.type == "cuda":
        return True
    large = tensor.is_cpu and tensor.nbytes >= LEAST and type(tensor) in (Tensor, nn.Parameter)
    return large and has_numba()


def digest_once(tensor: Tensor, digest: Callable[[], bytes]) -> bytes:
    """`digest()` of a tensor, unless all its bytes are as at the last call."""
    found = checksum(tensor)
    known: tuple[bytes, bytes] | None = _DIGESTS.get(tensor)
    if known is None or known[0] != found:
        known = _DIGESTS[tensor] = found, digest()
    return known[1]


def checksum(tensor: Tensor) -> bytes:
    """A digest of the hashes of a tensor's rows, which are computed on its device, and of the bytes
    after the last row. It holds for this process.

    Examples:
        >>> x = torch.zeros(3)
        >>> before = checksum(x)
        >>> x.data[1] = -0.0
        >>> checksum(x) == before
        False
    """
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    raw = raw.clone() if raw.storage_offset() % 4 else raw  # numbers of 32 bits begin at 4 bytes
    rest = raw[len(raw) // _ROW * _ROW :]
    digest = hashlib.sha256(memory_of(rest.cpu()))
    if len(rest) < len(raw):
        digest.update(memory_of(_hashes(raw[: len(raw) - len(rest)].view(torch.int32)).cpu()))
    return digest.digest()


def _hashes(numbers: Int32[Tensor, " n"]) -> Int64[Tensor, "2 rows"]:
    """The hashes of whole rows by both keys."""
    keys = _keys(numbers.device)
    if not (numbers.is_cpu and has_numba()):
        pieces = numbers.view(-1, 2, _HALF).split(-(-_PIECE // (2 * _HALF)))
        hashes = [[((x + key).long() & _LOW).prod(1).sum(1) for x in pieces] for key in keys]
        return torch.stack([torch.cat(each) for each in hashes])
    from regard.cache.paging.checksum_kernel import kernel  # imports numba

    out = torch.empty(2, len(numbers) // (2 * _HALF), dtype=torch.int64, device="cpu")
    places = numbers.data_ptr(), *(each.data_ptr() for each in keys), out.data_ptr()
    kernel(_HALF).ctypes(*places, out.shape[1])
    return out


@functools.cache
def _keys(device: torch.device) -> tuple[Int32[Tensor, "2 half"], Int32[Tensor, "2 half"]]:
    """The secret keys of both hashes."""
    drawn, (low, high) = torch.Generator(), (-(1 << 31), 1 << 31)
    drawn.seed()
    one, other = torch.randint(low, high, (2, 2, _HALF), generator=drawn, dtype=torch.int32)
    return one.to(device), other.to(device)
