"""Attention to one part of the keys as it is stored, by a backend that reads it so, or as tensors.

Codes of rotated keys and values are read as they are. Their queries are rotated alike, and the
outputs back, which costs less than rotating every key: products of two vectors do not change where
both are rotated (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456).

Keys that the rows of a batch share, such as a system prompt's, are read once for all of them. Under
a mask that hides nothing, rows are nothing but more queries: so the queries of all rows attend to
one row's keys, as one batch, and each row's results are split again (Hydragen, Juravsky et al.
2024, arXiv:2402.05099).
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from regard.cache import Part
from regard.cache.parts import AnyStream
from regard.cache.rotation import hadamard
from regard.constants import accumulating_dtype
from regard.masks import Span
from regard.ops.call import Backend, Call, hides_nothing
from regard.ops.observed import BACKEND_RUNS, report_backend
from regard.ops.partial import Partial
from regard.ops.parts import reads_stored

Blocks = tuple[int, ...]  # widths of the blocks of channels that are rotated


def run_of(
    backend: Backend, call: Call, q: Float[Tensor, "B H L D"], part: Part
) -> Float[Tensor, "B H L Dv"]:
    """Attention to one part, as the call over it says."""
    here, rows, k, v, rotated = _as_read(backend, call, q, part)
    out = backend.run(here, rows, k, v)
    return out if here is call else _rotate_back(call, out, rotated).to(call.dtype)


def partial_of(backend: Backend, call: Call, q: Float[Tensor, "B H L D"], part: Part) -> Partial:
    """`run_of` with the log-sum-exp."""
    here, rows, k, v, rotated = _as_read(backend, call, q, part)
    found = backend.partial(here, rows, k, v)
    return found if here is call else Partial(_rotate_back(call, found.out, rotated), found.lse)


def _as_read(
    backend: Backend, call: Call, q: Tensor, part: Part
) -> tuple[Call, Tensor, AnyStream, AnyStream, Blocks]:
    """The call, its queries, the keys and values as the backend reads them, and the rotated columns
    of the values. Queries are rotated as keys are, in float32, so that nothing is rounded."""
    if BACKEND_RUNS:
        report_backend(backend.run)
    k, v = call.keys_and_values(part if reads_stored(backend, part) else part.as_tensors())
    of_keys, of_values = (() if isinstance(x, Tensor) else x.rotation for x in (k, v))
    if not (of_keys or of_values):
        return call, q, k, v, ()
    dtype = accumulating_dtype(call.dtype)
    return call.but(dtype=dtype), hadamard(q.to(dtype), of_keys), k, v, of_values


def _rotate_back(call: Call, out: Tensor, blocks: Blocks) -> Tensor:
    """Undo the rotation of the values; a Hadamard matrix is its own inverse."""
    assert sum(blocks) <= call.v_head_dim, "of one stream, at most the values are rotated"
    return hadamard(out, blocks)


class Folded(NamedTuple):
    """Some rows of a call, as the queries of one: the call, its queries, the keys, and the rows."""

    call: Call
    q: Float[Tensor, "1 H BL D"]
    part: Part
    rows: int


def rows_at_once(call: Call, part: Part, backend: Backend) -> int:
    """How many rows of the call attend to the part together; 1 if each reads its own keys, or the
    backend objects to the queries of two rows in one call."""
    if call.batch == 1 or not part.is_shared:
        return 1
    if not call.immediate or call.needs_grad or call.dropout or not hides_nothing(call):
        return 1
    rows = call.batch
    while rows > 1 and backend.objection(_of_rows(call, rows)) is not None:
        rows = -(-rows // 2)
    return rows


def folded(call: Call, q: Float[Tensor, "B H L D"], part: Part, rows: int) -> Iterator[Folded]:
    """The call over shared keys as calls of one row, each with the queries of up to `rows`."""
    one = part.rows(0, 1)
    for some in q.split(rows):
        together = some.transpose(0, 1).flatten(1, 2).unsqueeze(0)
        yield Folded(_of_rows(call, len(some)), together, one, len(some))


def unfolded(x: Float[Tensor, "1 H BL X"], rows: int) -> Float[Tensor, "B H L X"]:
    """What belongs to the queries of so many rows, as rows again."""
    return x[0].unflatten(1, (rows, -1)).transpose(0, 1)


def _of_rows(call: Call, rows: int) -> Call:
    span = Span(0, rows * call.num_queries, call.span.kv_start, call.span.kv_stop)
    return call.but(batch=1, given_span=span, span=span)
