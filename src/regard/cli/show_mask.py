"""regard show mask: which keys each query may attend to, and why."""

from pathlib import Path
from typing import Any

from rich.console import Console

from regard.cli.sentences import printable
from regard.cli.terminal import print_json, stdout
from regard.masks import Mask, Span
from regard.masks.draw import grid
from regard.see.grammar import mask_from
from regard.see.mask_picture import png, sentence, span_of, svg, text
from regard.whole_file import write_whole
from regard.words import counted

PIPED = 80  # columns where stdout is no terminal
LISTED = 1 << 20  # cells of which --json lists the visible ones: about 7 MB of text


def run(
    *,
    mask: str,
    queries: int | None,
    keys: int | None,
    q_start: int,
    kv_start: int,
    batch_row: int,
    head: int,
    cell: str | None,
    svg: Path | None,
    png: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Draw the mask in the terminal, in the files that are given, or as JSON."""
    rule = mask_from(mask)
    _check_row("batch-row", batch_row, rule.batch, "row")
    _check_row("head", head, rule.heads, "head")
    span = span_of(rule, queries, keys, q_start=q_start, kv_start=kv_start)
    place = {"b": batch_row, "h": head}
    sentences = [] if cell is None else [sentence(rule, span, *_slots(cell), **place)]
    _write(rule, span, place, svg, png, html)
    if as_json:
        listed = {**_listed(rule, span, **place), "cell": sentences[0] if sentences else None}
        print_json(listed, indent=None)
        return
    console = stdout(piped=PIPED)
    files = [file for file in (svg, png, html) if file is not None]
    _print(console, sentences or [f"Saved in {file}." for file in files])
    if not sentences and not files:
        _print(console, text(rule, span, **place, width=console.width).splitlines())


def _check_row(option: str, index: int, size: int | None, what: str) -> None:
    if index >= (size or 1):
        has = counted(size or 1, what)
        raise ValueError(f"--{option} counts from 0, got {index}: the mask's data have {has}")


def _print(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(printable(line), markup=False, soft_wrap=True)


def _slots(cell: str) -> tuple[int, int]:
    """The slots of a query and a key, as `Q,K`."""
    parts = [part.strip() for part in cell.split(",")]
    if len(parts) != 2 or not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(
            f"--cell takes the slots of a query and a key, got {cell[:40]!r}; give Q,K, as in 3,0"
        )
    if max(map(len, parts)) > 15:
        raise ValueError("--cell takes slots of at most 15 digits")
    return int(parts[0]), int(parts[1])


def _write(
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


def _listed(mask: Mask, span: Span, *, b: int, h: int) -> dict[str, Any]:
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
