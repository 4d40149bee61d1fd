"""regard convert: another attention for a real model, with the loss measured."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table

from regard.cli.compare import WIDTH, progress_bar
from regard.convert.freed_memory import keep_freed_memory
from regard.convert.job import Job, run_job
from regard.convert.report import Report
from regard.convert.targets import GRAMMAR
from regard.convert.texts import read_texts
from regard.hf.loading import quiet


def convert_command(
    model: Annotated[Path, typer.Argument(help="A folder with *.safetensors, or a .gguf.")],
    to: Annotated[str, typer.Option(help=f"{GRAMMAR}.")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    form: Annotated[
        Literal["exact-rope", "deepseek"] | None,
        typer.Option(help="Of mla: keys rotated on reading, or DeepSeek's, which can be absorbed."),
    ] = None,
    portable: Annotated[
        bool, typer.Option("--portable", help="As a stock deepseek_v3 checkpoint.")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(help="Of the shipped cache, for --to mla: 0.5 is half.")
    ] = None,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Deal out ranks to the layers that need them.")
    ] = False,
    calibrate: Annotated[
        list[Path] | None, typer.Option(help="Text like what it will read; Python's own if none.")
    ] = None,
    heal: Annotated[
        list[Path] | None, typer.Option(help="Text to learn from the original model on.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Of healing.")] = 30.0,
    text: Annotated[
        list[Path] | None, typer.Option(help="More text to measure on; kept from the rest.")
    ] = None,
    low_memory: Annotated[
        bool, typer.Option("--low-memory", help="Keep one layer at a time in memory.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; torch's own choice if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only JSON on stdout.")] = False,
) -> None:
    """Turn a model's attention into another, say what that lost, and keep it in a folder."""
    if threads is not None:
        torch.set_num_threads(threads)
    job = Job(
        model=model,
        to=to,
        out=out,
        form=form,
        portable=portable,
        budget=budget,
        by_layer=by_layer,
        calibrate=_read(calibrate),
        heal=_read(heal),
        minutes=minutes,
        held_out=_read(text),
        low_memory=low_memory,
    )
    if heal:
        keep_freed_memory()
    with quiet(), progress_bar() as progress:
        report = run_job(job, progress=progress)
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=2, allow_nan=False) + "\n")
    else:
        show(report, out, Console(width=WIDTH, highlight=False))


def _read(files: list[Path] | None) -> dict[str, str]:
    """By name, or by path where two have one name."""
    given = files or []
    names = [file.name for file in given]
    said = [str(file) if names.count(file.name) > 1 else file.name for file in given]
    return dict(zip(said, read_texts(given), strict=True))


def show(report: Report, out: Path, console: Console) -> None:
    """Print what a conversion lost and gained."""
    before, after = report.before, report.after
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in ("", "before", "after"):
        table.add_column(head, justify="left" if not head else "right")
    for name in after.perplexity:
        numbers = (f"{each.perplexity[name]:,.3f}" for each in (before, after))
        table.add_row(f"perplexity, {name}", *numbers)
    for said, name, form in (
        ("cache bytes a token", "cache_bytes_per_token", ",.0f"),
        ("prefill tokens/s", "prefill_tokens_per_second", ",.0f"),
        ("decode tokens/s", "decode_tokens_per_second", ",.1f"),
    ):
        table.add_row(said, *(format(getattr(each, name), form) for each in (before, after)))
    console.print(f"[bold]{report.model}[/bold]: {report.was}, now {report.target}\n")
    console.print(table)
    how = "transformers loads it" if report.stock else "regard.hf.load reads it"
    console.print(
        f"\nPerplexity is {report.ratio:.3f} times the original's. Kept in {out}: {how}.",
        soft_wrap=True,
    )
    console.print(f"[dim]Took {report.seconds:.0f} s.[/dim]")
