"""`regard describe`, `plan` and `explain`: what follows from the shapes of a model."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from regard.cli.options import Json, Threads, named, refuse, size, spelled, start, verb
from regard.names import STORAGES, UNCHANGED

if TYPE_CHECKING:
    from regard.plan import ModelShape, Plan

CONTEXT = 4096  # tokens of `explain`, if none are given
MOST_MEMORY = 10**9  # GiB; a larger number is taken for an error


@verb
def describe(
    model: Annotated[
        Path,
        typer.Argument(
            help="A folder with config.json, a config.json, or a .gguf.", show_default=False
        ),
    ],
    as_json: Json = False,
) -> None:
    """The layers of a model's attention: their sizes, RoPE and cache. No weights are read.

    One line for each distinct layer, with the indices of the layers it stands for: its kind (MHA,
    GQA, MQA, MLA, linear), window or chunks, key heads that other layers use, sizes of heads,
    parameters, and bytes that a token adds to its cache. Below: rotary embeddings, the cache at
    the length the model was made for, and what regard can and cannot run of it.

    Read from a description of transformers 4 or 5, of llama.cpp, or one that regard has saved. An
    architecture or an entry that is not known is refused by name: a description would be a guess.
    """
    start("regard.cli.describe")
    from regard.cli import describe as described
    from regard.cli.terminal import print_json, stdout
    from regard.plan.describing import describe as describe_file

    shape = describe_file(model)
    if as_json:
        print_json(described.as_data(shape))
    else:
        described.show(shape, stdout(80))


@verb
def plan(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A folder with config.json, a config.json, or a .gguf; or give sizes.",
            show_default=False,
        ),
    ] = None,
    num_heads: Annotated[int | None, size("Query heads, instead of MODEL.")] = None,
    hidden_size: Annotated[int | None, size("Channels of the hidden states.")] = None,
    num_kv_heads: Annotated[int | None, size("Key heads; the query heads if left out.")] = None,
    head_dim: Annotated[
        int | None, size("Channels of a query; hidden size / heads if left out.")
    ] = None,
    v_head_dim: Annotated[int | None, size("Channels of a value, if others.")] = None,
    num_layers: Annotated[int | None, size("Layers; 1.")] = None,
    kv_lora_rank: Annotated[int | None, size("Of MLA: channels of its latent.")] = None,
    q_lora_rank: Annotated[int | None, size("Of MLA: channels of its query latent.")] = None,
    qk_rope_head_dim: Annotated[
        int | None, size("Channels with RoPE; a whole head if left out.", least=0)
    ] = None,
    window: Annotated[int | None, size("Keys that a query sees at most.")] = None,
    context: Annotated[int, size("Tokens of the prefill and in the cache.")] = 4096,
    batch: Annotated[int, size("Rows.")] = 1,
    memory: Annotated[
        float, typer.Option(help="GiB for the cache alone, of each rank, for what fits.")
    ] = 1.0,
    device: Annotated[
        list[str] | None,
        typer.Option(help="Whose least time is stated, as h100; this: your machine. Repeatable."),
    ] = None,
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of weights and plain caches; the model's if left out."),
    ] = None,
    tp: Annotated[int, size("Ranks that share the heads.")] = 1,
    cp: Annotated[int, size("Ranks that share the tokens.")] = 1,
    block: Annotated[
        int, size("As --all, with whole blocks of so many tokens; 16 in vLLM.", least=0)
    ] = 0,
    attention: Annotated[
        list[str] | None,
        typer.Option(help="A row: shipped, mha, gqa-4, mqa, mla-50, latent-50...; repeatable."),
    ] = None,
    storage: Annotated[
        list[str] | None,
        named(
            STORAGES,
            f"How caches store keys and values: {', '.join(STORAGES)}; repeatable.",
            also=UNCHANGED,
        ),
    ] = None,
    page_size: Annotated[
        int, size("Tokens of a page of a PagePool; 0: caches without pages.", least=0)
    ] = 0,
    every: Annotated[
        bool,
        typer.Option("--all", help="Every way of storing the cache: what is allocated."),
    ] = False,
    why: Annotated[
        bool, typer.Option("--why", help="How figures are counted, and why rows are missing.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write curves as a page.")] = None,
    as_json: Json = False,
) -> None:
    """Costs of each attention that a model could have: cache, time, and the context that fits."""
    sizes = {
        "num_heads": num_heads,
        "hidden_size": hidden_size,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "num_layers": num_layers,
        "kv_lora_rank": kv_lora_rank,
        "q_lora_rank": q_lora_rank,
        "qk_rope_head_dim": qk_rope_head_dim,
        "window": window,
    }
    call = {"context": context, "batch": batch, "tp": tp, "cp": cp}
    call |= {"page_size": page_size, "block": block}
    given = _chosen_sizes(model, sizes)
    if not 0 < memory <= MOST_MEMORY:
        refuse("--memory", f"{memory} GiB is not above 0 and at most {MOST_MEMORY:,}")
    start("regard.cli.plan")
    from regard.plan.planning import GIBIBYTE
    from regard.plan.planning import plan as plan_model

    found = plan_model(
        _shape(model, given, dtype),
        **call,
        memory=max(1, int(memory * GIBIBYTE)),
        devices=device or (),
        dtype=dtype,
        attentions=attention or (),
        storages=storage or (),
    )
    _report(found, every=every or block > 0, why=why, html=html, as_json=as_json)


def _shape(model: Path | None, sizes: dict[str, Any], dtype: str | None) -> "ModelShape":
    """The shapes of a model, or of one with these sizes."""
    if model is None:
        from regard.plan.from_sizes import model_from_sizes

        return model_from_sizes(**sizes, dtype=dtype or "float32")
    from regard.plan.describing import describe  # imports transformers

    return describe(model)


def _report(found: "Plan", *, every: bool, why: bool, html: Path | None, as_json: bool) -> None:
    """Write the page of a plan, and print its table or JSON."""
    from regard.cli.plan import as_data, show
    from regard.cli.terminal import print_json, say, stdout

    if html is not None:
        from regard.see.pages.curves import write_plan

        write_plan(found, html)
    if as_json:
        print_json(as_data(found))
        return
    show(found, stdout(80), every=every, why=why)
    if html is not None:
        say(stdout(80), f"written to {html}")


def _chosen_sizes(model: Path | None, sizes: Mapping[str, int | None]) -> dict[str, Any]:
    """The sizes that are given, which stand in place of a model."""
    given = {name: size for name, size in sizes.items() if size is not None}
    if model is not None and given:
        refuse(spelled(min(given)), "a MODEL has its own sizes")
    if model is None and not {"num_heads", "hidden_size"} <= given.keys():
        refuse("MODEL", "give a MODEL, or --num-heads and --hidden-size")
    return given


@verb
def explain(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A folder with config.json, such a file, or a .gguf; its weights are not read.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[int | None, size("Of a model: tokens, 4096 if left out.")] = None,
    num_heads: Annotated[int | None, size("Query heads, in place of a model.")] = None,
    num_kv_heads: Annotated[
        int | None, size("Key heads; as many as query heads if left out.")
    ] = None,
    head_dim: Annotated[int | None, size("Channels of a query or key.")] = None,
    v_head_dim: Annotated[int | None, size("Channels of a value; as of a key if left out.")] = None,
    queries: Annotated[int, size("New tokens; 1 is a decoding step.")] = 1,
    keys: Annotated[int | None, size("Tokens in all, 4096 if left out.")] = None,
    batch: Annotated[int, size("Rows.")] = 1,
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
    """Name the backend that runs a call, its simplified mask, and objections of the others."""
    sizes = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "keys": keys,
    }
    _check_call(model, context, {**sizes, "mask": mask})
    start("regard.cli.explain", threads=threads)
    from regard.cli import explain as shown
    from regard.cli.terminal import print_json, stdout
    from regard.plan.shapes import LayerShape
    from regard.words import counted

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
        numbers = dtype or shape.dtype
        found = shown.of_model(shape, tokens, queries, batch, numbers, device)
        missing = shown.refused(shape)
        title = f"{shape.name}: {counted(len(shape.layers), 'layer')}, {numbers}"
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
        refuse(spelled(min(given)), "a model says this itself")
    if model is None and context is not None:
        refuse("--context", "goes with a model; of sizes it is --keys")
    if model is None and not {"num_heads", "head_dim"} <= given.keys():
        refuse("MODEL", "give a model, or --num-heads and --head-dim")
    if given.get("num_heads", 0) % given.get("num_kv_heads", 1):
        refuse(
            "--num-kv-heads",
            f"{given['num_kv_heads']} does not divide the {given['num_heads']} query heads",
        )
