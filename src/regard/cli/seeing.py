"""`regard show` and `regard explain`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from regard.cli.options import (
    DEFAULT_MODEL,
    Json,
    OptionalModel,
    Threads,
    group,
    imported,
    set_threads,
    verb,
)

CONTEXT = 4096  # tokens, if none are given
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
    imported("show_mask")
    from regard.cli.show_mask import as_data, check_row, slots_of, write
    from regard.cli.terminal import print_json, print_lines, stdout
    from regard.see.grammar import mask_from
    from regard.see.mask_picture import sentence, span_of
    from regard.see.mask_picture import text as text_of

    rule = mask_from(mask)
    check_row("batch-row", batch_row, rule.batch, "row")
    check_row("head", head, rule.heads, "head")
    span = span_of(rule, queries, keys, q_start=q_start, kv_start=kv_start)
    place = {"b": batch_row, "h": head}
    said = None if cell is None else sentence(rule, span, *slots_of(cell), **place)
    write(rule, span, place, svg, png, html)
    if as_json:
        print_json({**as_data(rule, span, **place), "cell": said}, indent=None)
        return
    console, files = stdout(80), [file for file in (svg, png, html) if file is not None]
    saved = "\n".join(f"Saved in {file}." for file in files)
    print_lines(console, said or saved or text_of(rule, span, **place, width=console.width))


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
    imported("show_attention")
    from regard.cli import show_attention as shown
    from regard.cli.terminal import print_json, say, stdout

    set_threads(threads)
    prompt = str(text) if text_file is None else text_file.read_text(encoding="utf-8")
    most = shown.LARGEST if out is not None else shown.PAGE if html is not None else 0
    lists = (layers, heads, queries)
    looked = shown.look(model, prompt, lists, window=window, find=find, most=most)
    maps, asked, name = looked.maps, looked.asked, str(model or DEFAULT_MODEL)
    shown.write(looked, name, out=out, html=html, pictures=(svg, png))
    if as_json:
        print_json(shown.as_data(maps, asked, name, looked.found), indent=None)
        return
    say(stdout(80), f"{name}: {shown.said(maps, asked)}, in {looked.seconds:.1f} s.")
    shown.show(maps, asked, stdout(80), word=find, found=looked.found)


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
    _check_call(model, context, {**sizes, "mask": mask})
    imported("explain")
    from regard.cli import explain as shown
    from regard.cli.terminal import print_json, stdout
    from regard.plan.shapes import LayerShape
    from regard.words import counted

    set_threads(threads)
    tokens, missing, title = context or keys or CONTEXT, {}, ""
    if num_heads is not None and head_dim is not None:
        layer = LayerShape(
            hidden_size=num_heads * head_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads or num_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim or head_dim,
        )
        rule = mask or "Causal()"
        found = [shown.of_sizes(layer, rule, queries, tokens, batch, dtype or "float32", device)]
    else:
        from regard.plan.describing import describe  # imports transformers

        shape = describe(cast("Path", model))
        dtype = dtype or shape.dtype
        found = shown.of_model(shape, tokens, queries, batch, dtype, device)
        missing = shown.refused(shape)
        title = f"{shape.name}: {counted(len(shape.layers), 'layer')}, {dtype}"
    if as_json:
        calls = [asdict(each) for each in found]
        print_json({"model": title, "calls": calls, "refused": missing})
        return
    title += f"; {counted(tokens, 'token')}, {counted(batch, 'row')}" if title else ""
    shown.show(title, found, missing, stdout(80), why=why)


def _check_call(model: Path | None, context: int | None, sizes: dict[str, Any]) -> None:
    """Refuse sizes beside a model, and sizes that are no call."""
    given = {name: value for name, value in sizes.items() if value is not None}
    if model is not None and given:
        raise typer.BadParameter("a model says this itself", param_hint=_option(min(given)))
    if model is None and context is not None:
        raise typer.BadParameter("goes with a model; of sizes it is --keys", param_hint="--context")
    if model is None and not {"num_heads", "head_dim"} <= given.keys():
        raise typer.BadParameter("give a model, or --num-heads and --head-dim", param_hint="MODEL")
    if given.get("num_heads", 0) % given.get("num_kv_heads", 1):
        raise typer.BadParameter(
            f"{given['num_kv_heads']} does not divide the {given['num_heads']} query heads",
            param_hint="--num-kv-heads",
        )
