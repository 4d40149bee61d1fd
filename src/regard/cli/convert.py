"""regard convert: another attention for a real model, with the loss measured."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from regard.cli.layout import Column, tabulate
from regard.cli.loading import device_named
from regard.cli.terminal import print_json, progress_bar, say, stdout
from regard.convert.healing.environment import keep_freed_memory
from regard.convert.job import Job, run_job
from regard.convert.measuring import Measured
from regard.convert.report import Report
from regard.convert.texts import read_texts
from regard.hf.packages import quiet

COLUMNS = (Column("", words=True), Column("before"), Column("after"))


def run(
    *,
    model: Path,
    to: str,
    out: Path,
    calibrate: Sequence[Path] | None,
    heal: Sequence[Path] | None,
    text: Sequence[Path] | None,
    dtype: str | None,
    device: str,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert, save, and print a table or JSON; `options` are those of a `Job`."""
    if threads is not None:
        torch.set_num_threads(threads)
    job = Job(
        model=model,
        to=to,
        out=out,
        calibrate=_read(calibrate),
        heal=_read(heal),
        held_out=_read(text),
        dtype=None if dtype is None else getattr(torch, dtype),
        device=str(device_named(device)),
        **options,
    )
    if heal:
        keep_freed_memory()
    with quiet(), progress_bar() as progress:
        report = run_job(job, progress=progress)
    if as_json:
        print_json(report.as_dict())
    else:
        show(report, out, stdout())


def _read(files: Sequence[Path] | None) -> dict[str, str]:
    """The texts by file name, or by path if two files have one name."""
    given = files or []
    names = [file.name for file in given]
    unique = [str(file) if names.count(file.name) > 1 else file.name for file in given]
    return dict(zip(unique, read_texts(given), strict=True))


def show(report: Report, out: Path, console: Console) -> None:
    """Print the measurements before and after, as wide as the console."""
    rows = [[escape(title), *values] for title, *values in report.table()]
    say(console, f"{report.model}: {report.was}, now {_named(report)}", bold=report.model)
    console.print()
    tabulate(console, COLUMNS, rows)
    how = "transformers loads it" if report.stock else "regard.hf.load reads it"
    console.print()
    say(
        console,
        f"{report.quality}. {_saved(report, out)}: {how}.",
    )
    say(console, f"Before: {_ran(report.before)}. After: {_ran(report.after)}.", style="dim")
    say(console, f"Took {report.seconds:.0f} s.", style="dim")
    console.print()
    say(console, f'Next: regard generate {quote(str(out))} --prompt "..." writes text with it.')


def _named(report: Report) -> str:
    """The new attention, by the name that `regard compare` has for it."""
    target = report.target
    return str(target) if target.kind == "heads" else f"a {target.name} ({target})"


def _saved(report: Report, out: Path) -> str:
    return f"Saved in {out}" + (f", in {report.dtype}" if report.dtype else "")


def _ran(measured: Measured) -> str:
    if not (measured.prefill_backend or measured.decode_backend):
        return "transformers' own attention"
    return f"prefill on {measured.prefill_backend}, decoding on {measured.decode_backend}"
