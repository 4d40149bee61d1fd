"""regard bench: a few shapes on this machine, regard and each of its backends against torch."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.text import Text

from regard.cli.layout import tabulate
from regard.cli.options import Json, Threads, check_divides, option, size, start, verb
from regard.cli.terminal import print_measured, progress_bar, remarks, say, stdout
from regard.words import counted

if TYPE_CHECKING:
    from regard.bench import Bench, Entry, Measured

COLUMNS = ("what", "by", "ms", "ratio", "quartiles", "of limit")
LEGEND = (
    "ratio: time relative to torch's sdpa in the same round, median; same: no measurable "
    "difference, since 1 is between the quartiles; keys are cold. limit: the time of reading keys "
    "and values once, or of the products alone."
)


@verb
def bench(
    num_heads: int = size(32, "Query heads.", "--num-heads", "--heads"),
    num_kv_heads: int = size(8, "Key heads.", "--num-kv-heads", "--kv-heads"),
    head_dim: int = size(128, "Channels of a head."),
    keys: int = size(4096, "Tokens in the cache at most."),
    dtype: Literal["float32", "bfloat16"] = option("float32", "Of queries, keys and values."),
    threads: Threads = None,
    every: bool = option(False, "Rows of torch and of every backend, too.", "--all"),
    as_json: Json = False,
) -> None:
    """Time decoding and prefill on this machine: regard and its backends against torch."""
    check_divides(num_heads, num_kv_heads)
    start("regard.bench", threads=threads, timed=True)
    import torch

    from regard.bench import bench as measure

    torch.manual_seed(0)
    sizes = {"heads": num_heads, "kv_heads": num_kv_heads, "head_dim": head_dim, "keys": keys}
    with progress_bar() as progress:
        result = measure(**sizes, dtype=getattr(torch, dtype), progress=progress)
    if as_json:
        print_measured(asdict(result))
    else:
        show(result, stdout(), every=every)


def show(result: "Bench", console: Console, *, every: bool = False) -> None:
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
    more = "" if every else "--all shows torch and every backend; "
    say(console, f"Next: {more}regard tune measures the rates from which backends are chosen.")


def _rows(measured: "Measured", every: bool) -> list[list[str | Text]]:
    """A row for each entry of a shape, with what limits it; regard's is bold beside others."""
    shape = f"{measured.shape.name} ({measured.limit})"
    rows: list[list[str | Text]] = []
    for entry in measured.entries if every else [_own(measured)]:
        cells = [
            entry.name if every else entry.name.removeprefix("regard: "),
            f"{entry.milliseconds:,.3f}",
            f"{entry.ratio:.2f}" if entry.differs or entry is measured.entries[0] else "same",
            f"{entry.low:.2f}-{entry.high:.2f}",
            f"{entry.of_limit:.0%}",
        ]
        bold = every and entry is _own(measured)
        rows.append([shape, *(Text(cell, style="bold" * bold) for cell in cells)])
    return rows


def _own(measured: "Measured") -> "Entry":
    """The entry of the backend that regard chose."""
    return next(each for each in measured.entries if each.name.startswith("regard"))


def _verdict(result: "Bench") -> str:
    """In how many shapes regard is faster than torch and slower, and where its choice was wrong."""
    differing = [own.ratio for each in result.shapes if (own := _own(each)).differs]
    faster, shapes = sum(ratio < 1 for ratio in differing), counted(len(result.shapes), "shape")
    said = f"regard is faster than torch's sdpa in {faster} of {shapes}"
    said += f", slower in {len(differing) - faster}"
    better = "; ".join(
        each.shape.name
        for each in result.shapes
        if any(other.high < _own(each).low for other in each.entries[1:])
    )
    return f"{said}. Another backend was faster than its choice: {better or 'nowhere'}."


def _absent(result: "Bench") -> dict[str, str]:
    """The reasons why backends were not measured, by backend; by shape where shapes differ."""
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
