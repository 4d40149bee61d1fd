"""A mask drawn as text, for a terminal, and as SVG, for pages and notebooks."""

from html import escape
from typing import TYPE_CHECKING

from jaxtyping import Bool
from torch import Tensor

from regard.pooling import Pooled, pooled
from regard.span import Span
from regard.svg import svg

if TYPE_CHECKING:
    from regard.masks.mask import Mask

VISIBLE, HIDDEN = "■", "·"
SIZE = 8  # queries and keys that are drawn of a mask without data
SIDE = 512  # cells on a side of a picture; a larger mask is drawn in blocks
NOTEBOOK = 1 << 24  # cells of a mask that a notebook draws unasked: 4,096 x 4,096, 0.1 s


def picture(mask: "Mask", span: Span, b: int, h: int) -> str:
    """The mask's code, a line of key slots, then a line for each query slot."""
    cells = grid(mask, span, b, h).tolist()
    queries, keys = slots(span, b)
    margin, width = _digits(queries), _digits(keys)
    lines = [" ".join(f"{key:>{width}}" for key in keys)]
    lines += [" ".join(f"{VISIBLE if c else HIDDEN:>{width}}" for c in row) for row in cells]
    heads = ["", *queries]
    rows = [f"{head:>{margin}} {line}".rstrip() for head, line in zip(heads, lines, strict=True)]
    return "\n".join([repr(mask), *rows])


def grid(mask: "Mask", span: Span, b: int, h: int) -> Bool[Tensor, "L S"]:
    """The visible keys of each query, for one batch row and one head."""
    return _cells(mask, mask.within(span), span, b, h)


def _cells(mask: "Mask", placed: "Mask", span: Span, b: int, h: int) -> Bool[Tensor, "L S"]:
    rows = len(span.q_start) if isinstance(span.q_start, Tensor) else 1
    batch, heads = max(b + 1, rows, mask.batch or 1), max(h + 1, mask.heads or 1)
    visible = placed.dense(span, batch=batch, heads=heads, device="cpu")
    return visible.expand(batch, heads, span.num_queries, span.num_keys)[b, h]


def slots(span: Span, b: int) -> tuple[range, range]:
    """The slots of the queries of a batch row, and of the keys: none is listed."""
    if isinstance(first := span.q_start, Tensor):
        first = int(first[b if len(first) > 1 else 0])
    return range(first, first + span.num_queries), range(span.kv_start, span.kv_stop)


def in_blocks(mask: "Mask", span: Span, b: int, h: int, *, rows: int, columns: int) -> Pooled:
    """The cells of a mask, in no more blocks than that."""
    placed = mask.within(span)
    return pooled(lambda part: _cells(mask, placed, part, b, h), span, rows=rows, columns=columns)


def as_svg(mask: "Mask", span: Span, b: int, h: int, *, alone: bool) -> str:
    """The mask as SVG; `alone` if it is a file of its own and no part of a page."""
    cells = in_blocks(mask, span, b, h, rows=SIDE, columns=SIDE)
    return svg(repr(mask), cells, *slots(span, b), alone=alone)


def as_html(mask: "Mask") -> str | None:
    """The picture and the code, for a notebook; None if there is no picture of its data."""
    try:
        span = frame(mask, None, None)
        if span.num_queries * span.num_keys > NOTEBOOK:
            return None
        return (
            f"<div>{as_svg(mask, span, 0, 0, alone=False)}</div>\n<code>{escape(repr(mask))}</code>"
        )
    except ValueError:  # data that were written, or do not cover these slots
        return None


def frame(mask: "Mask", queries: "int | Span | None", keys: int | None) -> Span:
    """The slots to draw: those given, else the slots of the mask's data."""
    if isinstance(queries, Span):
        return queries
    if queries is None and keys is None:
        return mask.extent or Span(0, SIZE, 0, SIZE)
    rows, columns = (keys if queries is None else queries), (queries if keys is None else keys)
    assert rows is not None and columns is not None
    return Span(0, rows, 0, columns)


def _digits(slots: range) -> int:
    return max((len(str(slot)) for slot in slots), default=1)
