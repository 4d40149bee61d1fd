"""regard compare --frontier: bytes of the cache against loss, for every method and budget."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from regard.cli.layout import Column, tabulate
from regard.cli.loading import load_for
from regard.cli.terminal import print_json, progress_bar, remarks, say, stdout
from regard.compare import Frontier, FrontierRow, documents_of, frontier, texts_for
from regard.convert.texts import python_topics
from regard.hf import SMOLLM2, fetch_smollm2
from regard.hf.packages import quiet
from regard.page.page import check_can_write
from regard.see.pages.frontier import write_frontier
from regard.turns import Ratio

HEADS = ("cache bytes a token", "of shipped", "perplexity", "decode perplexity", "found")
WINDOWS = 8  # of text: with fewer, a bootstrap over windows has too little to draw from


def run(
    *,
    model: Path | None,
    text: Path | None,
    budget: float | None,
    context: int,
    windows: int,
    dtype: str | None,
    device: str,
    threads: int | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Load, measure, and print a table or JSON; write a page."""
    if html is not None:
        check_can_write(html)
    written = None if text is None else text.read_text(encoding="utf-8")
    if threads is not None:
        torch.set_num_threads(threads)
    with quiet(), progress_bar() as progress:
        if model is None:
            progress(f"loading {SMOLLM2} (fetched the first time: 93 MB)", 0, 0)
            model = fetch_smollm2()
        loaded = load_for(model, dtype=dtype, device=device)
        count = max(windows, WINDOWS)
        texts = texts_for(
            loaded.tokenizer, context=context, text=written, name=str(text), windows=count
        )
        documents = documents_of(loaded.tokenizer, python_topics()[0], context=context)
        result = frontier(
            loaded.model,
            texts,
            documents=documents,
            name=model.name,
            cache_dtype=loaded.stored,
            budget=budget,
            on_row=lambda so_far: progress.finished(line(so_far.rows[-1])),
            progress=progress,
        )
    if as_json:
        print_json(asdict(result) | {"verdict": result.verdict})
    else:
        show(result, stdout())
    if html is not None:  # last: an error of the disk then loses no result
        write_frontier(result, html)
        if not as_json:
            say(stdout(), f"written to {html}")


def show(result: Frontier, console: Console) -> None:
    """Print a frontier as a table; a star marks the rows on it."""
    say(
        console,
        f"{result.model}: {result.windows} windows of {result.context:,} tokens of {result.text}, "
        f"{result.questions} questions after compression",
        bold=result.model,
    )
    console.print()
    ran = [row for row in result.rows if row.decode_perplexity is not None]
    columns = [Column("method", words=True), *(Column(head) for head in HEADS)]
    tabulate(console, columns, [_cells(row) for row in ran])
    say(
        console,
        "*: no other row has both fewer bytes and a lower decode perplexity. Perplexities: ratios "
        "to the first row's, with 95 % intervals of a paired bootstrap over windows. Found: "
        "questions answered rightly about documents that were read before the question.",
        style="dim",
    )
    remarks(console, "Not run", {row.name: row.remark for row in result.rows if row.remark})
    console.print()
    say(console, result.verdict)


def _cells(row: FrontierRow) -> list[str]:
    return [escape(f"* {row.name}" if row.best else row.name), *cells(row)]


def cells(row: FrontierRow) -> Sequence[str]:
    """The numbers of a row that ran, in words.

    Examples:
        >>> from regard.compare import FrontierRow
        >>> from regard.turns import Ratio
        >>> cells(FrontierRow("int8", 6120.0, 0.53, 9.0, 8.0, Ratio(1.0, 0.99, 1.01, 8),
        ...     Ratio(1.02, 1.01, 1.03, 8), 0.97))
        ['6,120', '53%', '1.000 (0.990-1.010)', '1.020 (1.010-1.030)', '97%']
    """
    found = "" if row.found is None else f"{row.found:.0%}"
    return [
        f"{row.cache_bytes_per_token:,.0f}",
        f"{row.share:.0%}",
        _ratio(row.perplexity, row.perplexity_ratio),
        _ratio(row.decode_perplexity, row.decode_perplexity_ratio),
        found,
    ]


def _ratio(value: float | None, ratio: Ratio | None) -> str:
    if ratio is None:
        return f"{value:,.2f}"
    return f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"


def line(row: FrontierRow) -> str:
    """A row in one line, for a pipe."""
    if row.decode_perplexity is None:
        return f"{row.name}: not run: {row.remark}"
    said = zip(HEADS, cells(row), strict=True)
    return f"{row.name}: " + ", ".join(f"{head} {cell}" for head, cell in said)
