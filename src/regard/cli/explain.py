"""regard explain: which backend runs a call, and why the others do not; nothing is computed."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from regard.cli import options
from regard.cli.layout import tabulate
from regard.cli.options import option, size
from regard.cli.terminal import print_json, printable, say, stdout, wrapped
from regard.words import counted, ranges

if TYPE_CHECKING:
    from regard.cli.explaining import Explained

CONTEXT = 4096  # tokens, if none are given
OF_LAYER = ("num_heads", "num_kv_heads", "head_dim", "v_head_dim")
SIZES = (*OF_LAYER, "keys", "mask")
NAME = 9  # columns of the names that lines begin with
COLUMNS = ("", "layers", "attention", "keys read", "backend", "one layer")
NEXT = (
    "Times are estimates; the backend with the least runs. Next: --why says what each mask became, "
    "and what every other backend would take or objects to."
)


@options.verb
def explain(
    model: options.ModelOrSizes = None,
    context: int | None = size(None, "Of a model: tokens, 4096 if left out."),
    num_heads: options.NumHeads = None,
    num_kv_heads: options.NumKVHeads = None,
    head_dim: int | None = size(None, "Channels of a query or key."),
    v_head_dim: options.ValueDim = None,
    queries: int = size(1, "New tokens; 1 is a decoding step."),
    keys: int | None = size(None, "Tokens in all, 4096 if left out."),
    batch: options.Batch = 1,
    mask: str | None = option(None, 'A rule in quotes; "Causal()" if left out.'),
    dtype: options.AnyDtype | None = option(
        None, "Of queries, keys and values; float32 on a CPU, else the model's own."
    ),
    device: str = option("cpu", "Where they are: cpu, cuda."),
    threads: options.Threads = None,
    why: bool = option(False, "Of a model: masks, and why other backends do not run.", "--why"),
    as_json: options.Json = False,
) -> None:
    """Name the backend that runs a call, its simplified mask, and objections of the others."""
    given = {name: value for name, value in locals().items() if name in SIZES and value is not None}
    if model is None and context is not None:
        options.refuse("--context", "goes with a MODEL; of sizes it is --keys")
    options.check_source(model, given, "num_heads", "head_dim")
    options.check_divides(given.get("num_heads", 0), given.get("num_kv_heads", 1))
    options.start("regard.cli.explaining", threads=threads)
    from regard.cli.explaining import Tensors, of_model, of_sizes, refused

    tokens, missing, title = context or keys or CONTEXT, {}, ""
    if model is None:
        tensors = Tensors(batch, dtype or "float32", device)
        sizes = {name: given[name] for name in OF_LAYER if name in given}
        found = of_sizes(sizes, mask or "Causal()", queries, tokens, tensors)
    else:
        from regard.plan.describing import describe  # imports transformers

        shape = describe(model)
        usual = "float32" if device.startswith("cpu") else shape.dtype  # as models are loaded
        tensors = Tensors(batch, dtype or usual, device)
        found, missing = of_model(shape, tokens, queries, tensors), refused(shape)
        title = f"{shape.name}: {counted(len(shape.layers), 'layer')}, computed in {tensors.dtype}"
    if as_json:
        calls = [asdict(each) for each in found]
        print_json({"model": title, "calls": calls, "refused": missing})
        return
    title += f"; {counted(tokens, 'token')}, {counted(batch, 'row')}" if title else ""
    show(title, found, missing, stdout(80), why=why)


def show(
    title: str,
    found: Sequence["Explained"],
    missing: dict[str, list[int]],
    console: Console,
    *,
    why: bool = False,
) -> None:
    """Print a line for each call of a model; with `why`, or of sizes, all that is known of it."""
    if title:
        say(console, title, bold=title)
        console.print()
    brief = bool(title and found and not why)
    if brief:
        tabulate(console, COLUMNS, [_cells(each) for each in found])
        console.print()
    else:
        for each in found:
            _show_call(each, console)
    for reason, layers in missing.items():
        say(console, f"regard does not compute {_listed(layers)}: {reason.rstrip('.')}.")
    if brief:
        say(console, NEXT, style="dim")


def _show_call(each: "Explained", console: Console) -> None:
    if each.phase:
        say(console, f"{each.phase}, {each.kind} in {_listed(each.layers)}", style="bold")
    if each.form:
        _say_line(console, f"{'form':<{NAME}}{each.form}")
    first, *lines = str(each.call).splitlines()
    say(console, first)
    for line in lines:
        _say_line(console, line)
    if each.phase:
        console.print()


def _cells(each: "Explained") -> list[str]:
    """The cells of a table's row: the call of layers that are alike."""
    form = f", {each.form.partition(':')[0]}" if each.form else ""
    call = each.call
    (runs,) = (verdict for verdict in call.backends if verdict.name == call.runs)
    read, time = f"{call.kv_stop - call.kv_start:,}", str(runs).removeprefix("about ")
    return [
        each.phase.partition(" ")[0],
        ranges(each.layers),
        f"{each.kind}{form}",
        read,
        call.runs,
        time,
    ]


def _say_line(console: Console, line: str) -> None:
    """Print a line that begins with a name; when it is wrapped, further lines are indented to its
    text."""
    line = printable(line)
    text = wrapped(line[NAME:], console.width - NAME, margin="").splitlines()
    console.print(line[:NAME] + ("\n" + " " * NAME).join(text), markup=False, soft_wrap=True)


def _listed(layers: Sequence[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {ranges(layers)}"
