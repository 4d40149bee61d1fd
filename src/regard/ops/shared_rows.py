"""Keys that the rows of a batch share, such as a system prompt's: read once for all of them.

Under a mask that hides nothing, rows are nothing but more queries. So the queries of all rows
attend to one row's keys, as one batch, and each row's results are split again. Hydragen (Juravsky
et al. 2024, arXiv:2402.05099) does so with shared prefixes.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from regard.cache import Part
from regard.masks import Span
from regard.ops.call import Backend, Call, hides_nothing


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
    return call.but(batch=1, whole=span, span=span)
