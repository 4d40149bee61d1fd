"""regard bench: a few shapes on this machine, regard and each of its backends against torch."""

from dataclasses import asdict

import torch
from rich.console import Console

from regard.bench import Bench, Entry, Measured, bench
from regard.cli.layout import Column, tabulate
from regard.cli.terminal import print_json, progress_bar, remarks, say, stdout
from regard.words import counted

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COLUMNS = (
    Column("what", words=True),
    Column("by", left=True),
    Column("ms"),
    Column("ratio"),
    Column("quartiles"),
    Column("of limit"),
)
LEGEND = (
    "ratio: time relative to torch's sdpa in the same round, median; same: no measurable "
    "difference, since 1 is between the quartiles; keys are cold. limit: the time of reading keys "
    "and values once, or of the products alone."
)


def run(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    keys: int,
    dtype: str,
    threads: int | None,
    every: bool,
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
        show(result, stdout(), every=every)


def show(result: Bench, console: Console, *, every: bool = False) -> None:
    """Print the measurements as a table: of regard alone, or of torch and `every` backend, too."""
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
    tabulate(console, COLUMNS, [row for each in result.shapes for row in _rows(each, every)])
    if every:
        remarks(console, "Not measured", _absent(result))
    console.print()
    say(console, _verdict(result))
    say(console, LEGEND, style="dim")
    console.print()
    say(console, _next(result, every))


def _rows(measured: Measured, every: bool) -> list[list[str]]:
    """A row for each entry of a shape, with what limits it; regard's is bold beside others."""
    shape = f"{measured.shape.name} ({measured.limit})"
    rows = []
    for entry in measured.entries if every else [_own(measured)]:
        cells = [
            entry.name if every else entry.name.removeprefix("regard: "),
            f"{entry.milliseconds:,.3f}",
            f"{entry.ratio:.2f}" if entry.differs or entry is measured.entries[0] else "same",
            f"{entry.low:.2f}-{entry.high:.2f}",
            f"{entry.of_limit:.0%}",
        ]
        bold = every and entry is _own(measured)
        rows.append([shape, *(f"[bold]{cell}[/bold]" if bold else cell for cell in cells)])
    return rows


def _own(measured: Measured) -> Entry:
    """The entry of the backend that regard chose."""
    return next(each for each in measured.entries if each.name.startswith("regard"))


def _verdict(result: Bench) -> str:
    """In how many shapes regard is faster than torch, and slower."""
    found = [_own(each) for each in result.shapes]
    faster = [each for each in found if each.differs and each.ratio < 1]
    slower = [each for each in found if each.differs and each.ratio > 1]
    said = f"regard is faster than torch's sdpa in {len(faster)} of {counted(len(found), 'shape')}"
    said += f", slower in {len(slower)}" if slower else ", slower in none"
    better = [each.shape.name for each in result.shapes if _better(each)]
    if better:
        return f"{said}. Another backend than regard's choice was faster: {'; '.join(better)}."
    return f"{said}; no backend was faster than regard's choice."


def _better(measured: Measured) -> bool:
    """Whether a backend's quartiles lie below those of regard's choice."""
    return any(each.high < _own(measured).low for each in measured.entries[1:])


def _next(result: Bench, every: bool) -> str:
    """The next command."""
    tune = "regard tune measures the rates from which backends are chosen."
    if any(map(_better, result.shapes)):
        return f"Next: {tune}"
    return f"Next: {tune}" if every else f"Next: --all shows torch and every backend. {tune}"


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
