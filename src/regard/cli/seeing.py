"""The options of `regard show` and `regard explain`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.cli.options import Json, OptionalModel, Threads, group, verb

MOST = 10**12  # tokens, heads, channels, rows: a larger number is taken for an error

show = group("show", "Draw a mask, or where the heads of a model look.")

Svg = Annotated[Path | None, typer.Option(help="Write the picture as SVG.")]
Png = Annotated[Path | None, typer.Option(help="Write the picture as PNG.")]
Html = Annotated[Path | None, typer.Option(help="Write a page to explore in a browser.")]


def _check(**sizes: int | None) -> None:
    """Refuse numbers so large that they are mistakes."""
    for name, value in sizes.items():
        if value is not None and value > MOST:
            raise typer.BadParameter(f"{value} is above {MOST:,}", param_hint=_option(name))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@show
def show_mask(
    mask: Annotated[str, typer.Argument(help='A rule in quotes: "Causal() & SlidingWindow(4)".')],
    queries: Annotated[
        int | None,
        typer.Option(min=1, help="Queries; the mask's own, or as many as keys."),
    ] = None,
    keys: Annotated[
        int | None,
        typer.Option(min=1, help="Keys; the mask's own, or as many as queries."),
    ] = None,
    q_start: Annotated[int, typer.Option(min=0, help="The slot of the first query.")] = 0,
    kv_start: Annotated[int, typer.Option(min=0, help="The slot of the first key.")] = 0,
    batch_row: Annotated[int, typer.Option(min=0, help="The row of a mask with batches.")] = 0,
    head: Annotated[int, typer.Option(min=0, help="The head of a mask with heads.")] = 0,
    cell: Annotated[
        str | None, typer.Option(help="Say why a key is visible to a query or not: Q,K.")
    ] = None,
    svg: Svg = None,
    png: Png = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Draw a mask: which keys each query may attend to, and why."""
    _check(queries=queries, keys=keys, q_start=q_start, kv_start=kv_start)


@show
def show_attention(
    model: OptionalModel = None,
    text: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    text_file: Annotated[Path | None, typer.Option(help="A file with the prompt.")] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers whose maps are computed, as 0,3-5.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Heads of these layers, as 0,3-5, or LAYER.HEAD as 3.1,4.0.")
    ] = None,
    queries: Annotated[
        str | None, typer.Option(help="Tokens whose rows are computed, as 0,3-5.")
    ] = None,
    window: Annotated[
        tuple[int, int] | None,
        typer.Option(help="Show a part of the text: the first token, and how many."),
    ] = None,
    find: Annotated[str | None, typer.Option(help="Show the part around this word.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Save maps and tokens, as other viewers read them: .npz.")
    ] = None,
    svg: Svg = None,
    png: Png = None,
    html: Html = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Draw where the heads of a model look, while its fast kernels run."""
    if (text is None) == (text_file is None):
        raise typer.BadParameter("give one of --text and --text-file", param_hint="--text")
    if window is not None and find is not None:
        raise typer.BadParameter("give one of --window and --find", param_hint="--find")


@verb
def explain(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A folder with config.json, such a file, or a .gguf; its weights are not read.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Of a model: tokens, 4096 if left out."),
    ] = None,
    num_heads: Annotated[
        int | None, typer.Option(min=1, help="Query heads, in place of a model.")
    ] = None,
    num_kv_heads: Annotated[
        int | None,
        typer.Option(min=1, help="Key heads; as many as query heads if left out."),
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Channels of a query or key.")] = None,
    v_head_dim: Annotated[
        int | None,
        typer.Option(min=1, help="Channels of a value; as of a key if left out."),
    ] = None,
    queries: Annotated[int, typer.Option(min=1, help="New tokens; 1 is a decoding step.")] = 1,
    keys: Annotated[
        int | None, typer.Option(min=1, help="Tokens in all, 4096 if left out.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    mask: Annotated[
        str | None, typer.Option(help='A rule in quotes; "Causal()" if left out.')
    ] = None,
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of queries, keys and values; the model's own, or float32."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where they are: cpu, cuda.")] = "cpu",
    threads: Threads = None,
    why: Annotated[
        bool, typer.Option("--why", help="Of a model: masks, and why other backends do not run.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Which backend runs a call, what its mask became, and why the others do not run."""
    sizes = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "keys": keys,
    }
    _check(**sizes, queries=queries, context=context, batch=batch)
    given = [name for name, value in {**sizes, "mask": mask}.items() if value is not None]
    if model is not None and given:
        raise typer.BadParameter("a model says this itself", param_hint=_option(given[0]))
    if model is None and context is not None:
        raise typer.BadParameter("goes with a model; of sizes it is --keys", param_hint="--context")
    if model is None and (num_heads is None or head_dim is None):
        raise typer.BadParameter("give a model, or --num-heads and --head-dim", param_hint="MODEL")
    if num_heads is not None and num_kv_heads is not None and num_heads % num_kv_heads:
        raise typer.BadParameter(
            f"{num_kv_heads} does not divide the {num_heads} query heads",
            param_hint="--num-kv-heads",
        )
