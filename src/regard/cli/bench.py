"""regard bench: a few shapes on this machine, regard and each of its backends against torch."""

from dataclasses import asdict

import torch
from rich.console import Console

from regard.bench import Bench, Measured, bench
from regard.cli.layout import Column, tabulate
from regard.cli.terminal import print_json, progress_bar, remarks, say, stdout
from regard.words import counted

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COLUMNS = (
    Column("what", left=True),
    Column("by", left=True),
    Column("ms"),
    Column("ratio"),
    Column("quartiles"),
    Column("of the limit"),
)


def run(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    keys: int,
    dtype: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure, and print a table or JSON."""
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
        print_json(asdict(result))
    else:
        show(result, stdout())


def show(result: Bench, console: Console) -> None:
    """Print the measurements as a table."""
    one = result.shapes[0].shape
    heads = f"{counted(one.heads, 'head')} on {one.kv_heads}, head dim {one.head_dim}"
    threads = counted(result.threads, "thread")
    say(console, f"{heads}, {result.dtype}; torch {result.torch}, {threads}", bold=heads)
    say(
        console,
        f"Limits: {result.read_bandwidth / 1e9:.1f} GB/s read and "
        f"{result.product_rate / 1e9:.0f} GFLOP/s in products, measured just now.",
    )
    console.print()
    tabulate(console, COLUMNS, [row for each in result.shapes for row in _rows(each)])
    remarks(console, "Not measured", _absent(result))
    console.print()
    say(
        console,
        "ratio: time relative to torch in the same round, median; same: no measurable difference, "
        "since 1 is between the quartiles; keys are cold. limit: the time of reading keys and "
        "values once, or of the products alone.",
        style="dim",
    )


def _rows(measured: Measured) -> list[list[str]]:
    """A row for each entry of a shape, with what limits it; regard's is bold."""
    shape = f"{measured.shape.name} ({measured.limit})"
    rows = []
    for entry in measured.entries:
        cells = [
            entry.name,
            f"{entry.milliseconds:,.3f}",
            f"{entry.ratio:.2f}" if entry.differs or entry is measured.entries[0] else "same",
            f"{entry.low:.2f}-{entry.high:.2f}",
            f"{entry.of_limit:.0%}",
        ]
        ours = entry.name.startswith("regard")
        rows.append([shape, *(f"[bold]{cell}[/bold]" if ours else cell for cell in cells)])
    return rows


def _absent(result: Bench) -> dict[str, str]:
    """Why backends were not measured, by their names, and by shape where it is not for all."""
    shapes: dict[tuple[str, str], list[str]] = {}
    for measured in result.shapes:
        for name, reason in measured.absent.items():
            shapes.setdefault((name, reason), []).append(measured.shape.name)
    everywhere = len(result.shapes)
    return {
        f"backend {name}"
        if len(found) == everywhere
        else f"backend {name}, {'; '.join(found)}": why
        for (name, why), found in shapes.items()
    }
