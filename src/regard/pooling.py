"""The cells of a large mask in blocks, so that a picture of any size stays small."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.span import Span

MOST_CELLS = 1 << 28  # that one picture looks at: 16,384 x 16,384, about two seconds
STRIP = 1 << 22  # cells that are evaluated at a time: 4 MiB of booleans


class Pooled(NamedTuple):
    """The cells of a mask in blocks.

    Attributes:
        every: whether all cells of a block are visible.
        some: whether any is.
        high: queries of a block.
        wide: keys of a block.
        visible: the number of visible cells.
        masked: the number of fully masked rows.

    Examples:
        >>> import torch
        >>> from regard import Span
        >>> from regard.pooling import pooled
        >>> blocks = pooled(lambda span: torch.eye(4).bool(), Span(0, 4, 0, 4), rows=2, columns=2)
        >>> blocks.some.tolist(), blocks.every.any().item(), blocks.visible
        ([[True, False], [False, True]], False, 4)
    """

    every: Bool[Tensor, "Y X"]
    some: Bool[Tensor, "Y X"]
    high: int
    wide: int
    visible: int
    masked: int


def pooled(
    cells_of: Callable[[Span], Bool[Tensor, "L S"]], span: Span, *, rows: int, columns: int
) -> Pooled:
    """The cells in at most `rows` x `columns` blocks, whose sides are powers of two.

    Args:
        cells_of: the visible keys of the queries of a span.
        span: what is looked at, some queries at a time.
        rows: blocks down at most.
        columns: blocks across at most.

    Raises:
        ValueError: if the span has too many cells to look at all of them.
    """
    queries, keys = span.num_queries, span.num_keys
    if queries * keys > MOST_CELLS:
        raise ValueError(
            f"a picture shows at most {MOST_CELLS:,} cells, got {queries:,} queries x {keys:,} "
            "keys; draw fewer queries, such as the last ones"
        )
    high, wide = _side(queries, rows), _side(keys, columns)
    strip = high * max(1, STRIP // max(1, keys * high))
    every, some, visible, masked = [], [], 0, 0
    for first in range(0, queries, strip):
        stop = min(first + strip, queries)
        cells = cells_of(
            Span(span.q_start + first, span.q_start + stop, span.kv_start, span.kv_stop)
        )
        visible += int(cells.sum())
        masked += int((~cells.any(dim=1)).sum())
        some.append(_any(cells, high, wide))
        every.append(~_any(~cells, high, wide))
    nothing = torch.zeros(0, 0, dtype=torch.bool, device="cpu")
    return Pooled(
        torch.cat(every or [nothing]), torch.cat(some or [nothing]), high, wide, visible, masked
    )


def _side(cells: int, blocks: int) -> int:
    """The side of blocks of which no more than so many cover the cells: a power of two."""
    return 1 << max(0, -(-cells // blocks) - 1).bit_length()


def _any(cells: Tensor, high: int, wide: int) -> Tensor:
    """Whether any cell of each block is True. Beyond the edges of the mask no cell is."""
    if high == wide == 1:
        return cells
    rows, columns = cells.shape
    padded = cells.new_zeros(-(-rows // high) * high, -(-columns // wide) * wide)
    padded[:rows, :columns] = cells
    return padded.unflatten(0, (-1, high)).any(dim=1).unflatten(1, (-1, wide)).any(dim=2)
