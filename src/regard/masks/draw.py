"""A mask drawn as text, for a terminal."""

from typing import TYPE_CHECKING

from jaxtyping import Bool
from torch import Tensor

from regard.span import Span

if TYPE_CHECKING:
    from regard.masks.algebra import Mask

VISIBLE, HIDDEN = "■", "·"
SIZE = 8  # queries and keys that are drawn of a mask without data


def picture(mask: "Mask", span: Span, b: int, h: int) -> str:
    """The mask's code, a line of key slots, then a line for each query slot."""
    cells = grid(mask, span, b, h).tolist()
    slots = span.positions("cpu").reshape(-1, span.num_queries)
    queries = slots[b if len(slots) > 1 else 0].tolist()
    keys = range(span.kv_start, span.kv_stop)
    margin, width = _digits(queries), _digits(keys)
    lines = [" ".join(f"{key:>{width}}" for key in keys)]
    lines += [" ".join(f"{VISIBLE if c else HIDDEN:>{width}}" for c in row) for row in cells]
    heads = ["", *queries]
    rows = [f"{head:>{margin}} {line}".rstrip() for head, line in zip(heads, lines, strict=True)]
    return "\n".join([repr(mask), *rows])


def grid(mask: "Mask", span: Span, b: int, h: int) -> Bool[Tensor, "L S"]:
    """The visible keys of each query, for one batch row and one head."""
    rows = len(span.q_start) if isinstance(span.q_start, Tensor) else 1
    batch, heads = max(b + 1, rows, mask.batch or 1), max(h + 1, mask.heads or 1)
    visible = mask.within(span).dense(span, batch=batch, heads=heads, device="cpu")
    return visible.expand(batch, heads, span.num_queries, span.num_keys)[b, h]


def frame(mask: "Mask", queries: "int | Span | None", keys: int | None) -> Span:
    """The slots to draw: those given, else the slots of the mask's data."""
    if isinstance(queries, Span):
        return queries
    if queries is None and keys is None:
        return mask.extent or Span(0, SIZE, 0, SIZE)
    rows, columns = (keys if queries is None else queries), (queries if keys is None else keys)
    assert rows is not None and columns is not None
    return Span(0, rows, 0, columns)


def _digits(slots: "list[int] | range") -> int:
    return max((len(str(slot)) for slot in slots), default=1)
