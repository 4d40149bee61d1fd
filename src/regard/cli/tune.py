"""regard tune: measure what choosing a backend needs to know about this machine, and keep it."""

import json
import sys
from dataclasses import asdict, fields
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from regard.bench import Tuning, measure_speed
from regard.cli.compare import WIDTH, waiting
from regard.speed import DEFAULT, SPEED, Speed, forget_speed, write_speed

UNITS = {
    "call": ("to start an operator", 1e6, "us"),
    "products": ("float32 matrix products", 1e-9, "GFLOP/s"),
    "elements": ("elementwise work", 1e-9, "G/s"),
    "row_float": ("torch's kernel, one query, float32", 1e-9, "G/s"),
    "row_half": ("the same in half precision", 1e-9, "G/s"),
    "stream": ("fused, reading", 1e-9, "GB/s"),
    "fused": ("fused, many rows", 1e-9, "GFLOP/s"),
}


def tune_command(
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove what was kept; the source's rates again.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads, as your programs use; torch's choice if left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only JSON on stdout.")] = False,
) -> None:
    """Measure this machine once, so that the quickest backend is chosen on it."""
    if threads is not None:
        torch.set_num_threads(threads)
    if forget:
        gone = forget_speed()
        sys.stdout.write(f"removed {gone}\n" if gone else "nothing was kept\n")
        return
    before = SPEED.load()
    with waiting("measuring this machine"):
        tuning = measure_speed()
    objection = tuning.objection()
    if objection is not None:
        raise ValueError(f"{objection}; nothing was kept, measure again when it is quiet")
    path = write_speed(tuning.speed)
    SPEED.use(tuning.speed)
    if as_json:
        rates = {"source": DEFAULT, "before": before, "now": tuning.speed}
        written = {name: asdict(rate) for name, rate in rates.items()}
        written["spread"] = tuning.spread
        sys.stdout.write(json.dumps({"path": str(path), **written}, indent=2) + "\n")
        return
    console = Console(width=WIDTH, highlight=False, soft_wrap=False)
    console.print(_table(before, tuning))
    sys.stdout.write(f"\nkept in {path}\n")


def _table(before: Speed, tuning: Tuning) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("rate")
    for head in ("source", "before", "now", "", "quartiles apart"):
        table.add_column(head, justify="right")
    for rate in fields(Speed):
        what, factor, unit = UNITS.get(rate.name, (rate.name, 1.0, ""))
        values = (getattr(speed, rate.name) for speed in (DEFAULT, before, tuning.speed))
        cells = [f"{value * factor:.3g}" for value in values]
        apart = tuning.spread.get(rate.name)
        table.add_row(what, *cells, unit, "" if apart is None else f"{apart:.2f}x")
    return table
