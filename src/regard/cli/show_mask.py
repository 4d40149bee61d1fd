"""The parts of `regard show mask`: its checks, its files and its JSON."""

from pathlib import Path
from typing import Any

from regard.masks import Mask, Span
from regard.masks.draw import grid
from regard.see.mask_picture import png, svg
from regard.whole_file import write_whole
from regard.words import counted

LISTED = 1 << 20  # cells of which --json lists the visible ones: about 7 MB of text


def check_row(option: str, index: int, size: int | None, what: str) -> None:
    if index >= (size or 1):
        has = counted(size or 1, what)
        raise ValueError(f"--{option} counts from 0, got {index}: the mask's data have {has}")


def slots_of(cell: str) -> tuple[int, int]:
    """The slots of a query and a key, as `Q,K`."""
    parts = [part.strip() for part in cell.split(",")]
    if len(parts) != 2 or not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(
            f"--cell takes the slots of a query and a key, got {cell[:40]!r}; give Q,K, as in 3,0"
        )
    if max(map(len, parts)) > 15:
        raise ValueError("--cell takes slots of at most 15 digits")
    return int(parts[0]), int(parts[1])


def write(
    mask: Mask,
    span: Span,
    place: dict[str, int],
    to_svg: Path | None,
    to_png: Path | None,
    to_html: Path | None,
) -> None:
    if to_svg is not None:
        write_whole(to_svg, svg(mask, span, **place).encode())
    if to_png is not None:
        write_whole(to_png, png(mask, span, **place))
    if to_html is not None:
        from regard.see.pages import mask_cells

        mask_cells.write(mask, span, to_html, **place)


def as_data(mask: Mask, span: Span, *, b: int, h: int) -> dict[str, Any]:
    """The mask's code, its slots, and the keys that each query may attend to."""
    if span.num_queries * span.num_keys > LISTED:
        raise ValueError(
            f"--json lists the keys of at most {LISTED:,} cells, got {span.num_queries:,} queries "
            f"x {span.num_keys:,} keys; give --queries and --keys"
        )
    cells = grid(mask, span, b, h)
    return {
        "mask": repr(mask),
        "q_start": span.q_start,
        "q_stop": span.q_stop,
        "kv_start": span.kv_start,
        "kv_stop": span.kv_stop,
        "batch_row": b,
        "head": h,
        "rows": [
            {"query": query, "keys": [span.kv_start + key for key in row.nonzero()[:, 0].tolist()]}
            for query, row in zip(range(span.first_query, span.last_query + 1), cells, strict=True)
        ],
    }
