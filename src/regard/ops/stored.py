"""Attention to keys and values as they are stored: tensors, codes, or pages of either.

Codes of rotated keys and values are read as they are. Their queries are rotated alike, and the
outputs back, which costs less than rotating every key: products of two vectors do not change where
both are rotated (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456).
"""

from collections.abc import Callable
from typing import Any, TypeVar

from jaxtyping import Float
from torch import Tensor

from regard.cache import Part
from regard.cache.codes import QuantizedStream
from regard.cache.rotation import hadamard
from regard.constants import accumulating_dtype
from regard.ops.call import Backend, Call
from regard.ops.observed import BACKEND_RUNS, report_backend
from regard.ops.partial import Partial

Result = TypeVar("Result", Tensor, Partial)
Blocks = tuple[int, ...]  # widths of the blocks of channels that are rotated


def run_of(
    backend: Backend, call: Call, q: Float[Tensor, "B H L D"], part: Part
) -> Float[Tensor, "B H L Dv"]:
    """Attention to one part, as the call over it says."""
    if BACKEND_RUNS:
        report_backend(backend.run)
    read, stored = _reader(part, backend.paged, backend.quantized)
    if read is None:
        return backend.run(call, q, *call.keys_and_values(part))
    of_keys, of_values = _rotations(stored)
    if not (of_keys or of_values):
        out: Tensor = read(call, q, stored)
        return out
    wide, rows = _rotated(call, q, of_keys)
    return _back(call, read(wide, rows, stored), of_values).to(call.dtype)


def partial_of(backend: Backend, call: Call, q: Float[Tensor, "B H L D"], part: Part) -> Partial:
    """`run_of` with the log-sum-exp."""
    if BACKEND_RUNS:
        report_backend(backend.run)
    read, stored = _reader(part, backend.paged_partial, backend.quantized_partial)
    if read is None:
        return backend.partial(call, q, *call.keys_and_values(part))
    of_keys, of_values = _rotations(stored)
    if not (of_keys or of_values):
        found: Partial = read(call, q, stored)
        return found
    out, lse = read(*_rotated(call, q, of_keys), stored)
    return Partial(_back(call, out, of_values), lse)


def _reader(
    part: Part, of_pages: Callable[..., Any] | None, of_codes: Callable[..., Any] | None
) -> tuple[Callable[..., Any] | None, Any]:
    """What reads the part as it is stored, and the streams for it; None if its values are read."""
    if of_pages is not None and part.paged is not None:
        return of_pages, part.paged
    return (None if part.quantized is None else of_codes), part.quantized


def _rotations(stored: Any) -> tuple[Blocks, Blocks]:
    """The rotations of keys and of values; of one stream they are the same."""
    slabs = [getattr(each, "slab", each) for each in stored]
    blocks = [x.rotation if isinstance(x, QuantizedStream) else () for x in slabs]
    return blocks[0], blocks[-1]


def _rotated(call: Call, q: Tensor, blocks: Blocks) -> tuple[Call, Tensor]:
    """The call with queries rotated as the keys are: in float32, so that nothing is rounded."""
    dtype = accumulating_dtype(call.dtype)
    return call.but(dtype=dtype), hadamard(q.to(dtype), blocks)


def _back(call: Call, out: Tensor, blocks: Blocks) -> Tensor:
    """The output with the rotation of the values undone; a Hadamard matrix is its own inverse."""
    assert sum(blocks) <= call.v_head_dim, "of one stream, at most the values are rotated"
    return hadamard(out, blocks)
