"""regard show mask: which keys each query may attend to, and why."""

import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import Html, Json, Png, Svg, option, shows, size, start, verb
from regard.cli.terminal import print_json, print_lines, stdout
from regard.words import counted

if TYPE_CHECKING:
    from regard.masks import Mask, Span

LISTED = 1 << 20  # cells of which --json lists the visible ones: about 7 MB of text


@partial(verb, of=shows)
def show_mask(
    mask: Annotated[str, typer.Argument(help='A rule in quotes: "Causal() & SlidingWindow(4)".')],
    queries: int | None = size(None, "Queries; the mask's own, or as many as keys."),
    keys: int | None = size(None, "Keys; the mask's own, or as many as queries."),
    q_start: int = size(0, "The slot of the first query.", least=0),
    kv_start: int = size(0, "The slot of the first key.", least=0),
    batch_row: int = size(0, "The row of a mask with batches.", least=0),
    head: int = size(0, "The head of a mask with heads.", least=0),
    cell: str | None = option(None, "Say why a key is visible to a query or not: Q,K."),
    svg: Svg = None,
    png: Png = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Draw a mask: which keys each query may attend to, and why."""
    start("regard.see.mask_picture")
    from regard.see import mask_picture
    from regard.see.grammar import mask_from
    from regard.see.pages import mask_cells
    from regard.whole_file import write_whole

    rule = mask_from(mask)
    _check_row("batch-row", batch_row, rule.batch, "row")
    _check_row("head", head, rule.heads, "head")
    span = mask_picture.span_of(rule, queries, keys, q_start=q_start, kv_start=kv_start)
    place = {"b": batch_row, "h": head}
    said = None
    if cell is not None:
        said = mask_picture.sentence(rule, span, *_slots_of(cell), **place)
    if svg is not None:
        write_whole(svg, mask_picture.svg(rule, span, **place).encode())
    if png is not None:
        write_whole(png, mask_picture.png(rule, span, **place))
    if html is not None:
        mask_cells.write(rule, span, html, **place)
    if as_json:
        print_json({**_as_data(rule, span, batch_row, head), "cell": said}, indent=None)
        return
    console, files = stdout(80), [file for file in (svg, png, html) if file is not None]
    text = said or "\n".join(f"Saved in {file}." for file in files)
    print_lines(console, text or mask_picture.text(rule, span, **place, width=console.width))


def _check_row(option: str, index: int, size: int | None, what: str) -> None:
    if index >= (size or 1):
        has = counted(size or 1, what)
        raise ValueError(f"--{option} counts from 0, got {index}: the mask's data have {has}")


def _slots_of(cell: str) -> tuple[int, int]:
    """The slots of a query and a key, as `Q,K`."""
    if not re.fullmatch(r"\s*\d{1,15}\s*,\s*\d{1,15}\s*", cell, re.ASCII):
        raise ValueError(
            "--cell takes the slots of a query and a key, of at most 15 digits each, got "
            f"{cell[:40]!r}; give Q,K, as in 3,0"
        )
    query, _, key = cell.partition(",")
    return int(query), int(key)


def _as_data(mask: "Mask", span: "Span", b: int, h: int) -> dict[str, Any]:
    """The mask's code, its slots, and the keys that each query may attend to."""
    from regard.masks.draw import grid

    if span.num_queries * span.num_keys > LISTED:
        raise ValueError(
            f"--json lists the keys of at most {LISTED:,} cells, got {span.num_queries:,} queries "
            f"x {span.num_keys:,} keys; give --queries and --keys"
        )
    queries = range(span.first_query, span.last_query + 1)
    rows = [
        {"query": query, "keys": [span.kv_start + key for key in row.nonzero()[:, 0].tolist()]}
        for query, row in zip(queries, grid(mask, span, b, h), strict=True)
    ]
    slots = {each: getattr(span, each) for each in ("q_start", "q_stop", "kv_start", "kv_stop")}
    return {"mask": repr(mask), **slots, "batch_row": b, "head": h, "rows": rows}
