"""regard convert: another attention for a real model, with the loss measured."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from regard.cli.layout import tabulate
from regard.cli.options import Device, Json, Threads, option, refuse, start, verb
from regard.cli.terminal import print_json, progress_bar, say, stdout
from regard.names import TARGETS

if TYPE_CHECKING:
    from regard.convert.measuring import Measured
    from regard.convert.report import Report

COLUMNS = ("", "before", "after")


@verb
def convert(
    model: Annotated[Path, typer.Argument(help="A folder with *.safetensors, or a .gguf.")],
    to: str = option(..., f"{TARGETS}."),
    out: Path = option(..., "The folder to make."),
    form: Literal["exact-rope", "deepseek"] | None = option(
        None, "Of mla: keys rotated on reading, or DeepSeek's, which can be absorbed."
    ),
    portable: bool = option(False, "As a stock deepseek_v3 checkpoint.", "--portable"),
    budget: float | None = option(None, "Cache for --to mla: 0.5 is half of the model's own."),
    by_layer: bool = option(False, "Choose a rank for each layer.", "--by-layer"),
    calibrate: list[Path] | None = option(None, "Text to calibrate on; installed texts if none."),
    heal: list[Path] | None = option(None, "Text for distillation from the original model."),
    own_text: bool = option(False, "Heal on text that the model writes, too.", "--own-text"),
    minutes: float | None = option(None, "Time for healing; 30 if left out.", min=0.01),
    text: list[Path] | None = option(None, "Held-out text to measure on, too."),
    low_memory: bool = option(False, "Load one layer at a time.", "--low-memory"),
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "Of the weights that are written; the checkpoint's own if left out."
    ),
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Convert a model's attention, report what that lost, and save it in a folder."""
    if minutes is not None and not (heal or own_text):
        refuse("--minutes", "it is the time for healing; give a text, --heal FILE, or --own-text")
    start("regard.convert.job", threads=threads)
    import torch

    from regard.cli.loading import device_named
    from regard.convert.healing.environment import keep_freed_memory
    from regard.convert.job import Job, run_job
    from regard.hf.packages import quiet

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
        own_text=own_text,
        held_out=_read(text),
        minutes=30.0 if minutes is None else minutes,
        low_memory=low_memory,
        dtype=None if dtype is None else getattr(torch, dtype),
        device=str(device_named(device)),
    )
    if heal or own_text:
        keep_freed_memory()
    with quiet(), progress_bar() as progress:
        report = run_job(job, progress=progress)
    if as_json:
        print_json(report.as_dict())
    else:
        show(report, out, stdout())


def _read(files: Sequence[Path] | None) -> dict[str, str]:
    """The texts by file name, or by path if two files have one name."""
    from regard.convert.texts import read_texts

    given = files or []
    names = [file.name for file in given]
    unique = [str(file) if names.count(file.name) > 1 else file.name for file in given]
    return dict(zip(unique, read_texts(given), strict=True))


def show(report: "Report", out: Path, console: Console) -> None:
    """Print the measurements before and after, as wide as the console."""
    target = report.target  # by the name that `regard compare` has for it
    now = str(target) if target.kind == "heads" else f"a {target.name} ({target})"
    say(console, f"{report.model}: {report.was}, now {now}", bold=report.model)
    console.print()
    tabulate(console, COLUMNS, report.table())
    dtype = f", in {report.dtype}" if report.dtype else ""
    how = "transformers loads it" if report.stock else "regard.hf.load reads it"
    console.print()
    say(console, f"{report.quality}. Saved in {out}{dtype}: {how}.")
    if report.before.prefill_tokens_per_second is not None:  # speeds were measured
        say(console, f"Before: {_ran(report.before)}. After: {_ran(report.after)}.", style="dim")
    say(console, f"Took {report.seconds:.0f} s.", style="dim")
    console.print()
    say(console, f'Next: regard generate {quote(str(out))} --prompt "..." writes text with it.')


def _ran(measured: "Measured") -> str:
    if not (measured.prefill_backend or measured.decode_backend):
        return "transformers' own attention"
    return f"prefill on {measured.prefill_backend}, decoding on {measured.decode_backend}"
