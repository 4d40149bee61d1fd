"""regard compare: a real model with each attention that it can have, side by side."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from regard.cache_folder import cache_folder
from regard.cli import frontier as frontiers
from regard.cli.cache import stored_by_compare
from regard.cli.layout import Column, tabulate
from regard.cli.loading import load_for
from regard.cli.terminal import print_json, progress_bar, remarks, say, stdout
from regard.compare import Comparison, Proof, Row, chosen, compare, texts_for
from regard.compare.ahead import kernels_ahead
from regard.compare.measure import SHORT, cells
from regard.compare.result import explained
from regard.convert.healing.environment import keep_freed_memory
from regard.hf import SMOLLM2, fetch_smollm2
from regard.hf.packages import quiet
from regard.ops.explain import kernel_objection
from regard.page.page import check_can_write
from regard.see.pages.curves import write_comparison
from regard.words import counted

GIBIBYTE = 1 << 30
NEXT = "Next: four times the --windows halve the intervals; regard convert makes a model of a row."


def run(*, frontier: bool = False, budget: float | None = None, **given: Any) -> None:
    """The comparison, or with `frontier` or a `budget` the bytes of caches against loss."""
    if frontier or budget is not None:
        for name in ("attention", "memory", "full"):
            del given[name]
        frontiers.run(budget=budget, **given)
    else:
        run_comparison(**given)


def run_comparison(
    *,
    model: Path | None,
    text: Path | None,
    attention: Sequence[str] | None,
    context: int,
    windows: int | None,
    memory: float,
    dtype: str | None,
    device: str,
    threads: int | None,
    full: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Load, compare, and print a table or JSON; write a page.

    Raises:
        KeyboardInterrupt: after the rows so far are printed, if the user stops the command.
    """
    if html is not None:
        check_can_write(html)
    written = None if text is None else text.read_text(encoding="utf-8")
    if threads is not None:
        torch.set_num_threads(threads)
    rows = chosen(attention or ())
    keep_freed_memory()
    found: list[Comparison] = []
    stopped = None
    ahead = kernels_ahead(
        model or cache_folder() / SMOLLM2, rows, context=context, dtype=dtype, device=device
    )
    with ahead, quiet(), progress_bar() as progress:  # a fork comes before threads

        def on_row(so_far: Comparison) -> None:
            found.append(so_far)
            progress.finished(_line(so_far), partial(_print_table, so_far, full))

        if model is None:
            progress(f"loading {SMOLLM2} (fetched the first time: 93 MB)", 0, 0)
            model = fetch_smollm2()
        loaded = load_for(model, dtype=dtype, device=device)
        texts = texts_for(
            loaded.tokenizer, context=context, text=written, name=str(text), windows=windows or 1
        )
        try:
            result = compare(
                loaded.model,
                texts,
                name=model.name,
                memory=int(memory * GIBIBYTE),
                cache_dtype=loaded.stored,
                candidates=rows,
                prefills=full,
                on_row=on_row,
                progress=progress,
            )
        except KeyboardInterrupt as interrupt:
            if not found:
                raise
            result, stopped = found[-1], interrupt
    _show_or_print(result, full=full, html=html, as_json=as_json)
    if stopped is not None:
        say(Console(stderr=True), f"regard: stopped after {len(result.rows)} of {len(rows)} rows")
        raise stopped


def _show_or_print(result: Comparison, *, full: bool, html: Path | None, as_json: bool) -> None:
    """The table or JSON on stdout, and the page."""
    if as_json:
        print_json(as_data(result))
    else:
        show(result, stdout(), full=full)
    if html is not None:  # last: an error of the disk then loses no result
        write_comparison(result, html)
        if not as_json:
            say(stdout(), f"written to {html}")


def as_data(result: Comparison) -> dict[str, Any]:
    """What `--json` prints: all that was measured, without the sizes of the layers."""
    data = asdict(result)
    for row in data["rows"]:
        del row["layers"], row["storage"]
    return data


def show(result: Comparison, console: Console, *, full: bool = True) -> None:
    """Print a comparison as a table, as wide as the console; with a few columns unless `full`."""
    layers, threads = counted(result.num_layers, "layer"), counted(result.threads, "thread")
    say(
        console,
        f"{result.model}: {layers} of {result.kind}, {result.dtypes}, {threads}; "
        f"{result.context:,} tokens of {result.text}; its logits agree "
        f"{_proved(result.proof, full)}.",
        bold=result.model,
    )
    console.print()
    _print_table(result, full, console)
    say(console, explained(result), style="dim")
    remarks(console, "Not run", {row.name: row.remark for row in result.rows if row.remark})
    console.print()
    say(console, result.verdict)
    for sentence in backends_of(result.rows) if full else []:
        say(console, sentence, style="dim")
    say(console, f"Measured in {result.seconds:.0f} s{stored_by_compare()}. {NEXT}")


def _proved(proof: Proof, full: bool) -> str:
    if proof.largest_difference == 0.0:
        return "to the last bit"
    figures = f": {proof.largest_difference:.1e} of {proof.tolerance:.1e}" if full else ""
    return f"within rounding{figures}"


def backends_of(rows: Sequence[Row]) -> list[str]:
    """Which backends ran which rows, and why the compiled kernel cannot run if so."""
    ran = [row for row in rows if row.perplexity is not None]
    sentences = [
        f"{what} ran on {_shared(ran, name)}."
        for what, name in (("Prefill", "prefill_backend"), ("Decoding", "decode_backend"))
        if any(getattr(row, name) for row in ran)
    ]
    objection = kernel_objection()
    return sentences if objection is None else [*sentences, f"fused did not run: {objection}."]


def _shared(rows: Sequence[Row], name: str) -> str:
    """The backend of most rows, then the others with their rows."""
    by_backend: dict[str, list[str]] = {}
    for row in rows:
        by_backend.setdefault(getattr(row, name) or "no backend of regard", []).append(row.name)
    most, *others = sorted(by_backend.items(), key=lambda each: -len(each[1]))
    return most[0] + "".join(f" (on {backend}: {'; '.join(rows)})" for backend, rows in others)


def _print_table(result: Comparison, full: bool, console: Console) -> None:
    chosen = {name: head for name, head in result.columns.items() if full or name in SHORT}
    columns = [Column("attention", words=True)]
    columns += [Column(head, group=group) for head, group in chosen.values()]
    ran = [row for row in result.rows if row.perplexity is not None]
    tabulate(console, columns, [_cells(row, chosen) for row in ran])


def _cells(row: Row, columns: Iterable[str]) -> list[str]:
    name = f"{row.name} (exact)" if row.exact else row.name
    return [escape(name), *cells(row, columns)]


def _line(result: Comparison) -> str:
    """The latest row in one line, for a pipe."""
    row = result.rows[-1]
    if row.perplexity is None:
        return f"{row.name}: not run: {row.remark}"
    heads = (result.columns[name][0] for name in SHORT)
    said = zip(heads, cells(row, SHORT), strict=True)
    return f"{row.name}: " + ", ".join(f"{head} {cell}" for head, cell in said)
