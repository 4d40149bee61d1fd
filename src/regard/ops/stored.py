"""Attention to keys and values as they are stored, by a backend that reads them so, or as tensors.

Codes of rotated keys and values are read as they are. Their queries are rotated alike, and the
outputs back, which costs less than rotating every key: products of two vectors do not change where
both are rotated (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456).
"""

from jaxtyping import Float
from torch import Tensor

from regard.cache import Part
from regard.cache.parts import AnyStream
from regard.cache.rotation import hadamard
from regard.constants import accumulating_dtype
from regard.ops.call import Backend, Call
from regard.ops.observed import BACKEND_RUNS, report_backend
from regard.ops.partial import Partial
from regard.ops.parts import reads_stored

Blocks = tuple[int, ...]  # widths of the blocks of channels that are rotated


def run_of(
    backend: Backend, call: Call, q: Float[Tensor, "B H L D"], part: Part
) -> Float[Tensor, "B H L Dv"]:
    """Attention to one part, as the call over it says."""
    if BACKEND_RUNS:
        report_backend(backend.run)
    k, v = _as_read(call, part, backend)
    of_keys, of_values = _rotation(k), _rotation(v)
    if not (of_keys or of_values):
        return backend.run(call, q, k, v)
    wide, rows = _rotated(call, q, of_keys)
    return _back(call, backend.run(wide, rows, k, v), of_values).to(call.dtype)


def partial_of(backend: Backend, call: Call, q: Float[Tensor, "B H L D"], part: Part) -> Partial:
    """`run_of` with the log-sum-exp."""
    if BACKEND_RUNS:
        report_backend(backend.run)
    k, v = _as_read(call, part, backend)
    of_keys, of_values = _rotation(k), _rotation(v)
    if not (of_keys or of_values):
        return backend.partial(call, q, k, v)
    out, lse = backend.partial(*_rotated(call, q, of_keys), k, v)
    return Partial(_back(call, out, of_values), lse)


def _as_read(call: Call, part: Part, backend: Backend) -> tuple[AnyStream, AnyStream]:
    """Keys and values as they are stored, if the backend reads them so; else as tensors."""
    return call.keys_and_values(part if reads_stored(backend, part) else part.as_tensors())


def _rotation(stream: AnyStream) -> Blocks:
    return () if isinstance(stream, Tensor) else stream.rotation


def _rotated(call: Call, q: Tensor, blocks: Blocks) -> tuple[Call, Tensor]:
    """The call with queries rotated as the keys are: in float32, so that nothing is rounded."""
    dtype = accumulating_dtype(call.dtype)
    return call.but(dtype=dtype), hadamard(q.to(dtype), blocks)


def _back(call: Call, out: Tensor, blocks: Blocks) -> Tensor:
    """The output with the rotation of the values undone; a Hadamard matrix is its own inverse."""
    assert sum(blocks) <= call.v_head_dim, "of one stream, at most the values are rotated"
    return hadamard(out, blocks)
