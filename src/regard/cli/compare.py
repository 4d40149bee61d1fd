"""regard compare: a real model under each attention it can be turned into, side by side."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from regard.compare import CANDIDATES, Comparison, Proof, Row, chosen, compare, texts_for
from regard.hf import SMOLLM2, fetch_smollm2, load
from regard.hf.loading import quiet

WIDTH = 100
GIBIBYTE = 1 << 30


def compare_command(
    model: Annotated[
        Path | None,
        typer.Argument(
            help=f"A folder with config.json and *.safetensors, or a .gguf; {SMOLLM2} if left out.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text to measure on; topics of Python's own help if left out."),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(help=f"Rows, again and again: {', '.join(each.key for each in CANDIDATES)}."),
    ] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens in each of two windows.")] = 1024,
    memory: Annotated[
        float, typer.Option(help="GiB for the cache, to say what context fits.")
    ] = 1.0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; torch's own choice if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only JSON on stdout.")] = False,
) -> None:
    """Cache, speed and perplexity of a real model under each attention it can be turned into."""
    if memory <= 0:
        raise typer.BadParameter(f"{memory} GiB holds nothing", param_hint="--memory")
    written = None if text is None else text.read_text(encoding="utf-8")
    if threads is not None:
        torch.set_num_threads(threads)
    rows = chosen(attention or ())
    with quiet(), progress_bar() as progress:
        if model is None:
            progress(f"loading {SMOLLM2} (fetched the first time: 93 MB)", 0, 0)
            model = fetch_smollm2()
        lent, tokenizer = load(model)
        texts = texts_for(tokenizer, context=context, text=written, name=str(text))
        result = compare(
            lent,
            texts,
            name=model.name,
            memory=int(memory * GIBIBYTE),
            candidates=rows,
            progress=progress,
        )
    if as_json:
        sys.stdout.write(json.dumps(asdict(result), indent=2, allow_nan=False) + "\n")
    else:
        show(result, Console(width=WIDTH, highlight=False, soft_wrap=False))


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on stderr what is waited for, as long as it takes."""
    with Progress(
        TextColumn(what), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        bar.add_task(what, total=None)
        yield


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr that goes away when the work is done; a total of 0 is not known yet."""
    columns = TextColumn("{task.description:<50}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield progress


def show(result: Comparison, console: Console) -> None:
    """Print a comparison for people, in 100 columns."""
    console.print(
        f"[bold]{result.model}[/bold]: {result.num_layers} layers of {result.kind}, "
        f"{result.dtype}, {result.threads} threads; {result.context:,} tokens of {result.text}"
    )
    console.print(f"Run by regard, {_proved(result.proof)}.\n")
    console.print(_table(result))
    console.print(f"\n{result.verdict}")
    console.print(f"[dim]Measured in {result.seconds:.0f} s.[/dim]")


def _proved(proof: Proof) -> str:
    if proof.largest_difference == 0.0:
        return "its logits are its own to the last bit"
    return (
        f"its logits are its own: they differ by {proof.largest_difference:.1e} at most, "
        f"and rounding explains {proof.tolerance:.1e}"
    )


def _table(result: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("attention", no_wrap=True)
    memory = f"tokens in\n{result.memory / GIBIBYTE:g} GiB"
    heads = ("cache bytes\na token", memory, "prefill\ntokens/s", "decode\ntokens/s")
    for head in (*heads, "perplexity", "logits differ\nby at most"):
        table.add_column(head, justify="right", vertical="bottom")
    for row in result.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    name = f"{row.name} (exact)" if row.exact else row.name
    if row.cache_bytes_per_token is None:
        return [name, f"[dim]{row.remark}[/dim]"]
    return [
        name,
        f"{row.cache_bytes_per_token:,.0f}",
        _number(row.context_in_memory, ",.0f"),
        _number(row.prefill_tokens_per_second, ",.0f"),
        _number(row.decode_tokens_per_second, ",.1f"),
        _number(row.perplexity, ",.3f"),
        _number(row.largest_logit_difference, ".1e"),
    ]


def _number(value: Any, form: str) -> str:
    return format(value, form)
