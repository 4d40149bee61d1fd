"""regard compare --frontier: bytes of the cache against loss, for every method and budget."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from regard.cli.layout import Column, tabulate
from regard.cli.loading import load_for
from regard.cli.terminal import print_json, progress_bar, remarks, say, stdout
from regard.compare import Frontier, FrontierRow, documents_of, frontier, texts_for
from regard.compare.frontiers import HEADS, cells
from regard.convert.texts import python_topics
from regard.hf import SMOLLM2, fetch_smollm2
from regard.hf.packages import quiet
from regard.page.page import check_can_write
from regard.see.pages.frontier import write_frontier

WINDOWS = 8  # of text: with fewer, a bootstrap over windows has too little to draw from


def run(
    *,
    model: Path | None,
    text: Path | None,
    budget: float | None,
    context: int,
    windows: int | None,
    dtype: str | None,
    device: str,
    threads: int | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Load, measure, and print a table or JSON; write a page.

    Raises:
        ValueError: if there are too few windows for a bootstrap.
    """
    count = WINDOWS if windows is None else windows
    if count < WINDOWS:
        raise ValueError(
            f"--windows {count}: a frontier draws its intervals from {WINDOWS} windows or more"
        )
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
            on_row=lambda so_far: progress.finished(
                line(so_far.rows[-1]), partial(print_table, so_far)
            ),
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
    print_table(result, console)
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


def print_table(result: Frontier, console: Console) -> None:
    """Print the rows that ran."""
    ran = [row for row in result.rows if row.decode_perplexity is not None]
    columns = [Column("method", words=True), *(Column(head) for head in HEADS)]
    tabulate(console, columns, [_cells(row) for row in ran])


def _cells(row: FrontierRow) -> list[str]:
    return [escape(f"* {row.name}" if row.best else row.name), *cells(row)]


def line(row: FrontierRow) -> str:
    """A row in one line, for a pipe."""
    if row.decode_perplexity is None:
        return f"{row.name}: not run: {row.remark}"
    said = zip(HEADS, cells(row), strict=True)
    return f"{row.name}: " + ", ".join(f"{head} {cell}" for head, cell in said)
