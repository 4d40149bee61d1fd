"""regard bench: this machine, a few shapes, regard and each of its backends against torch."""

import json
import sys
from dataclasses import asdict
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table

from regard.bench import Bench, Measured, bench
from regard.cli.compare import WIDTH, progress_bar

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def bench_command(
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key heads; divides the query heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Channels of a head.")] = 128,
    keys: Annotated[int, typer.Option(min=1, help="Tokens in the cache at most.")] = 4096,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of queries, keys and values.")
    ] = "float32",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; torch's own choice if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only JSON on stdout.")] = False,
) -> None:
    """How fast attention is here: decoding and prefill, regard and its backends against torch."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    with progress_bar() as progress:
        result = bench(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            keys=keys,
            dtype=DTYPES[dtype],
            progress=progress,
        )
    if as_json:
        sys.stdout.write(json.dumps(asdict(result), indent=2, allow_nan=False) + "\n")
    else:
        show(result, Console(width=WIDTH, highlight=False, soft_wrap=False))


def show(result: Bench, console: Console) -> None:
    """Print the measurements for people, in 100 columns."""
    one = result.shapes[0].shape
    console.print(
        f"[bold]{one.heads} heads on {one.kv_heads}, head dim {one.head_dim}, {result.dtype}[/bold]"
        f"; torch {result.torch}, {result.threads} threads"
    )
    console.print(
        f"At most {result.read_bandwidth / 1e9:.1f} GB/s read and "
        f"{result.product_rate / 1e9:.0f} GFLOP/s in products, measured just now.\n"
    )
    console.print(_table(result))
    console.print(
        "\n[dim]ratio: time to torch's, median of rounds that take turns; keys are cold. limit: "
        "what reading\nkeys and values once, or the products alone, would take.[/dim]"
    )


def _table(result: Bench) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("what", no_wrap=True)
    table.add_column("by", no_wrap=True)
    for head in ("ms", "ratio", "quartiles", "of the limit"):
        table.add_column(head, justify="right", no_wrap=True)
    for measured in result.shapes:
        _add(table, measured)
    return table


def _add(table: Table, measured: Measured) -> None:
    for index, entry in enumerate(measured.entries):
        ours = entry.name.startswith("regard")
        cells = [
            entry.name,
            f"{entry.milliseconds:,.3f}",
            f"{entry.ratio:.2f}",
            f"{entry.low:.2f}-{entry.high:.2f}",
            f"{entry.of_limit:.0%} of {measured.limit}",
        ]
        table.add_row(
            "" if index else measured.shape.name,
            *(f"[bold]{cell}[/bold]" if ours else cell for cell in cells),
            end_section=index == len(measured.entries) - 1,
        )
