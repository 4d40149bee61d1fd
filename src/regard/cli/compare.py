"""regard compare: a real model with each attention that it can have, side by side."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from regard.cli.layout import tabulate
from regard.cli.options import (
    DEFAULT_MODEL,
    Device,
    Dtype,
    Json,
    OptionalModel,
    Threads,
    check_memory,
    option,
    refuse,
    start,
    verb,
)
from regard.cli.terminal import print_measured, progress_bar, remarks, say, stdout

if TYPE_CHECKING:
    from regard.compare import Comparison, Frontier, Row

ROWS = (
    "shipped, int8, int4, k8v4, k6v4, k4v4, mha, gqa, mqa, latent-100, latent-75, latent-50, "
    "latent-25, deepseek-100, deepseek-75, deepseek-50, portable-75, portable-50, latent-50-int8, "
    "deepseek-50-int8"
)
GIBIBYTE = 1 << 30
WINDOWS = 8  # of text, of a frontier: with fewer, a bootstrap over windows has too little to draw
NEXT = "Next: four times as many --windows halve the intervals; regard convert saves a row's model."


@verb
def compare(
    model: OptionalModel = None,
    text: Path | None = option(
        None, "Text to measure on; topics of Python's own help if left out."
    ),
    attention: list[str] | None = option(
        None,
        f"A row; may be repeated. Six rows if left out, twelve with `all`. Rows: {ROWS}.",
        autocompletion=lambda: ROWS.split(", "),
    ),
    context: int = option(512, "Tokens in each window.", min=2),
    windows: int | None = option(
        None, "Windows of text: more narrow the intervals. 1; 8 with --frontier.", min=1
    ),
    memory: float = option(1.0, "GiB of cache, for the context that fits."),
    dtype: Dtype = None,
    device: Device = "cpu",
    threads: Threads = None,
    full: bool = option(False, "Every column; prefills are timed in turns, too.", "--full"),
    frontier: bool = option(
        False,
        "Bytes against loss instead: quantised, in pages, evicted, latent, and these together.",
        "--frontier",
    ),
    budget: float | None = option(
        None, "With --frontier: the methods that fit this share of the cache."
    ),
    html: Path | None = option(None, "Write the table and curves of the caches as a page."),
    as_json: Json = False,
) -> None:
    """Cache, speed and perplexity of a model under each attention it can be converted to."""
    check_memory(memory)
    if budget is not None and not 0 < budget < 1:
        refuse("--budget", f"{budget} is not between 0 and 1")
    frontier = frontier or budget is not None
    if frontier and attention:
        refuse("--attention", "a frontier has rows of its own")
    if frontier and (windows or WINDOWS) < WINDOWS:
        refuse("--windows", f"a frontier draws its intervals from {WINDOWS} windows or more")
    start("regard.compare", threads=threads)
    from regard.compare import chosen
    from regard.convert.texts import read_text
    from regard.page.page import check_can_write

    if html is not None:
        check_can_write(html)
    rows = chosen(attention or ())
    texts = {
        "context": context,
        "text": None if text is None else read_text(text),
        "name": str(text),
        "windows": windows or (WINDOWS if frontier else 1),
    }
    own = {"candidates": rows, "memory": int(memory * GIBIBYTE), "prefills": full}
    options = {"budget": budget} if frontier else own
    result, stopped = _measured(model, dtype, device, texts, options, full=full)
    _report(result, full=full, html=html, as_json=as_json)
    if stopped is not None:
        done = f"{len(result.rows)}{'' if frontier else f' of {len(rows)}'} rows"
        say(Console(stderr=True), f"regard: stopped after {done}")
        raise stopped


def _measured(
    model: Path | None,
    dtype: str | None,
    device: str,
    texts: dict[str, Any],
    options: dict[str, Any],
    *,
    full: bool,
) -> tuple["Comparison | Frontier", KeyboardInterrupt | None]:
    """Load a model, compare it, and show each row; if the user stops that, the rows so far."""
    from regard import compare as comparing
    from regard.cache_folder import cache_folder
    from regard.cli.loading import load_for
    from regard.compare.ahead import kernels_ahead
    from regard.convert.healing.environment import keep_freed_memory
    from regard.convert.texts import python_topics
    from regard.hf.packages import quiet

    keep_freed_memory()
    so_far: list[Comparison | Frontier] = []
    folder, rows = model or cache_folder() / DEFAULT_MODEL, options.get("candidates", ())
    ahead = kernels_ahead(folder, rows, context=texts["context"], dtype=dtype, device=device)
    with ahead, quiet(), progress_bar() as progress:  # a fork comes before threads

        def on_row(result: "Comparison | Frontier") -> None:
            so_far.append(result)
            progress.finished(_line(result), partial(_print_table, result, full))

        loaded = load_for(model, dtype=dtype, device=device, progress=progress)
        options |= {"name": loaded.name, "cache_dtype": loaded.stored}
        options |= {"on_row": on_row, "progress": progress}
        measured = comparing.texts_for(loaded.tokenizer, **texts)
        try:
            if "budget" not in options:
                return comparing.compare(loaded.model, measured, **options), None
            text, context = python_topics()[0], texts["context"]
            documents = comparing.documents_of(loaded.tokenizer, text, context=context)
            return comparing.frontier(loaded.model, measured, documents=documents, **options), None
        except KeyboardInterrupt as interrupt:
            if not so_far:
                raise
            return so_far[-1], interrupt


def _report(
    result: "Comparison | Frontier", *, full: bool, html: Path | None, as_json: bool
) -> None:
    """Print the table or JSON, and write the page."""
    if as_json:
        print_measured(as_data(result))
    else:
        show(result, stdout(), full=full)
    if html is not None:  # last: an error of the disk then loses no result
        from regard.see.pages.curves import write_result

        write_result(result, html)
        if not as_json:
            say(stdout(), f"written to {html}")


def as_data(result: "Comparison | Frontier") -> dict[str, Any]:
    """The data of `--json`: all measurements, without the sizes of the layers."""
    data = asdict(result) | {"verdict": result.verdict}
    for row in data["rows"]:
        del row["layers"], row["storage"]
    return data


def show(result: "Comparison | Frontier", console: Console, *, full: bool = True) -> None:
    """Print a comparison or a frontier, as wide as the console; of a comparison with a few columns
    unless `full`."""
    from regard.cli.cache import stored_by_compare
    from regard.compare import Comparison

    proved = ""
    if isinstance(result, Comparison):
        proof = result.proof
        figures = f": {proof.largest_difference:.1e} of {proof.tolerance:.1e}" if full else ""
        agree = f"within rounding{figures}" if proof.largest_difference else "to the last bit"
        proved = f"; logits are transformers' {agree}."
    say(console, f"{result.model}: {result.about}{proved}", bold=result.model)
    console.print()
    _print_table(result, full, console)
    say(console, result.legend, style="dim")
    remarks(console, "Not run", {row.name: row.remark for row in result.rows if row.remark})
    console.print()
    say(console, result.verdict)
    if isinstance(result, Comparison):
        for sentence in backends_of(result.rows) if full else []:
            say(console, sentence, style="dim")
        say(console, f"Measured in {result.seconds:.0f} s{stored_by_compare()}. {NEXT}")


def backends_of(rows: Sequence["Row"]) -> list[str]:
    """Sentences on the backends of the rows, and on the compiled kernel if it cannot run."""
    from regard.ops.explain import kernel_objection

    ran = [row for row in rows if row.perplexity is not None]
    sentences = [
        f"{what} ran on {_shared(ran, name)}."
        for what, name in (("Prefill", "prefill_backend"), ("Decoding", "decode_backend"))
        if any(getattr(row, name) for row in ran)
    ]
    objection = kernel_objection()
    return sentences if objection is None else [*sentences, f"fused did not run: {objection}."]


def _shared(rows: Sequence["Row"], name: str) -> str:
    """The backend of most rows, then the others with their rows."""
    by_backend: dict[str, list[str]] = {}
    for row in rows:
        by_backend.setdefault(getattr(row, name) or "no backend of regard", []).append(row.name)
    most, *others = sorted(by_backend.items(), key=lambda each: -len(each[1]))
    return most[0] + "".join(f" (on {backend}: {'; '.join(rows)})" for backend, rows in others)


def _print_table(result: "Comparison | Frontier", full: bool, console: Console) -> None:
    tabulate(console, *result.table(full))


def _line(result: "Comparison | Frontier") -> str:
    """The latest row in one line, for a pipe."""
    if (row := result.rows[-1]).remark:
        return f"{row.name}: not run: {row.remark}"
    (_, *heads), rows = result.table(full=False)
    _, *cells = rows[-1]
    said = zip(heads, cells, strict=True)
    return f"{row.name}: " + ", ".join(f"{head} {cell}" for head, cell in said)
