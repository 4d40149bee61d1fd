"""`regard describe` and `regard plan`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from regard.cli.options import Json, imported, named, verb
from regard.names import STORAGES, UNCHANGED

if TYPE_CHECKING:
    from regard.plan import ModelShape, Plan

LINKS = ("nvlink-4", "nvlink-5", "pcie-5", "infiniband-ndr", "ethernet-100")
MOST_MEMORY = 10**9  # GiB; larger numbers here and below are taken for errors
MOST_OF = {"context": 10**12, "window": 10**12, "batch": 10**9}  # tokens, tokens, rows
MOST_OF_OTHERS = 10**6  # heads, channels, layers, ranks


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
    imported("describe")
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
    num_heads: Annotated[
        int | None, typer.Option(min=1, help="Query heads, instead of MODEL.")
    ] = None,
    hidden_size: Annotated[
        int | None, typer.Option(min=1, help="Channels of the hidden states.")
    ] = None,
    num_kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key heads; the query heads if left out.")
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option(min=1, help="Channels of a query; hidden size / heads if left out."),
    ] = None,
    v_head_dim: Annotated[
        int | None, typer.Option(min=1, help="Channels of a value, if others.")
    ] = None,
    num_layers: Annotated[int | None, typer.Option(min=1, help="Layers; 1.")] = None,
    kv_lora_rank: Annotated[
        int | None, typer.Option(min=1, help="Of MLA: channels of its latent.")
    ] = None,
    q_lora_rank: Annotated[
        int | None, typer.Option(min=1, help="Of MLA: channels of its query latent.")
    ] = None,
    qk_rope_head_dim: Annotated[
        int | None,
        typer.Option(min=0, help="Channels with RoPE; a whole head if left out."),
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Keys that a query sees at most.")
    ] = None,
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of the prefill and in the cache.")
    ] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
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
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share the heads.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Ranks that share the tokens.")] = 1,
    link: Annotated[
        list[str] | None,
        named(LINKS, f"Between the ranks: {', '.join(LINKS)}. Repeatable."),
    ] = None,
    block: Annotated[
        int,
        typer.Option(min=0, help="As --all, with whole blocks of so many tokens; 16 in vLLM."),
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
        int, typer.Option(min=0, help="Tokens of a page of a PagePool; 0: caches without pages.")
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
    """What each attention a model could have costs: cache, time, and the context that fits."""
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
    _check_most(sizes | call)
    if not (math.isfinite(memory) and 0 < memory <= MOST_MEMORY):
        raise typer.BadParameter(
            f"{memory} GiB is not above 0 and at most {MOST_MEMORY:,}", param_hint="--memory"
        )
    imported("plan")
    from regard.plan.planning import GIBIBYTE
    from regard.plan.planning import plan as plan_model

    found = plan_model(
        _shape(model, given, dtype),
        **call,
        memory=max(1, int(memory * GIBIBYTE)),
        devices=device or (),
        dtype=dtype,
        links=link or (),
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
        raise typer.BadParameter("a MODEL has its own sizes", param_hint=_option(min(given)))
    if model is None and not {"num_heads", "hidden_size"} <= given.keys():
        raise typer.BadParameter(
            "give a MODEL, or --num-heads and --hidden-size", param_hint="MODEL"
        )
    return given


def _check_most(given: Mapping[str, int | None]) -> None:
    for name, value in given.items():
        most = MOST_OF.get(name, MOST_OF_OTHERS)
        if value is not None and value > most:
            raise typer.BadParameter(f"{value} is above {most:,}", param_hint=_option(name))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
