"""regard describe: the layers of a model's attention, from its description alone."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from regard.cli.layout import tabulate
from regard.cli.options import Json, start, verb
from regard.cli.terminal import print_json, remarks, say, stdout
from regard.page.readable import readable_bytes
from regard.words import counted, ranges

if TYPE_CHECKING:
    from regard.plan import LayerShape, ModelShape

NEXT = "Next: regard plan says what other attentions and caches cost, and what fits."
COLUMNS = ("layers", "attention", "heads", "head size", "parameters", "bytes a token")
SHOWN = 5  # runs of layers that are listed, at most
NUMBER = r"[^()\[\],]+"
LONG_LIST = re.compile(rf"([(\[]{NUMBER}, {NUMBER})((?:, {NUMBER}){{4,}})([)\]])")


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
    start("regard.plan.describing")
    from regard.plan.describing import describe as describe_file

    shape = describe_file(model)
    if as_json:
        print_json(as_data(shape))
    else:
        show(shape, stdout(80))


def as_data(model: "ModelShape") -> dict[str, Any]:
    """The data of `--json`: the model's entries, and those of each distinct layer with its costs.

    The parameters of linear attention are None: they do not follow from its sizes.
    """
    layers = [
        {
            "indices": list(indices),
            "kind": layer.kind,
            **asdict(layer),
            "parameters": _parameters(layer),
            "cache_bytes_per_token": _token_bytes(model, layer),
            "cached_tokens_at_most": layer.window if layer.window is not None else layer.chunk,
            "state_bytes": _cache(model, layer, 1) if layer.kind == "linear" else 0,
        }
        for layer, indices in model.distinct().items()
    ]
    whole = asdict(model) | {
        "num_layers": len(model.layers),
        "attention_parameters": _all_parameters(model),
        "cache_bytes": cache_of(model, model.max_positions),
    }
    return whole | {"layers": layers}


def _parameters(layer: "LayerShape") -> int | None:
    from regard.plan.shapes import Workload
    from regard.plan.weights import parameters

    return None if layer.kind == "linear" else parameters(layer, Workload(context=1))


def _all_parameters(model: "ModelShape") -> int | None:
    """The parameters of all layers together; None if those of a layer cannot be counted."""
    found = [_parameters(layer) for layer in model.layers]
    known = [count for count in found if count is not None]
    return sum(known) if len(known) == len(found) else None


def _cache(model: "ModelShape", layer: "LayerShape", context: int) -> int:
    """Bytes of the layer's cache for so many tokens; encoders have none, nor have layers that
    share keys."""
    from regard.plan.cache_bytes import cache_bytes
    from regard.plan.shapes import STORAGES, Workload

    work = Workload(context=context, dtype=model.dtype)
    return cache_bytes(layer, STORAGES["plain"], work) if layer.causal else 0


def _token_bytes(model: "ModelShape", layer: "LayerShape") -> int:
    """Bytes that a token adds to the layer's cache."""
    return 0 if layer.kind == "linear" else _cache(model, layer, 1)


def cache_of(model: "ModelShape", context: int | None) -> int | None:
    """Bytes of all caches for so many tokens; None without a context."""
    if context is None:
        return None
    return sum(_cache(model, layer, context) for layer in model.layers)


def show(model: "ModelShape", console: Console) -> None:
    """Print a line for each distinct layer, and what follows from all of them."""
    say(console, f"{model.name}: {_summary(model)}", bold=model.name)
    console.print()
    distinct = model.distinct()
    every = _common_traits(distinct)
    cells = [_cells(model, layer, at, every) for layer, at in distinct.items()]
    tabulate(console, COLUMNS, cells)
    console.print()
    if every:
        say(console, f"Every layer: {'; '.join(every)}.")
    for rope, indices in by_words(model, lambda layer: layer.rope).items():
        say(console, f"Layers {_few(indices)}: {shortened(rope)}.")
    say(console, " ".join(_totals(model)))
    _print_reasons(model, console)
    console.print()
    following = [NEXT] if any(layer.causal for layer in model.layers) else []
    for sentence in (*model.remarks, *following):
        say(console, sentence, style="dim")


def _print_reasons(model: "ModelShape", console: Console) -> None:
    """Print the reasons why no layer of regard computes some layers."""
    reasons = by_words(model, lambda layer: layer.unsupported)
    if [len(indices) for indices in reasons.values()] == [len(model.layers)]:
        say(console, f"No layer of regard computes them: {', '.join(reasons)}.")
        return
    by_layers = {f"Layers {_few(indices)}": reason for reason, indices in reasons.items()}
    remarks(console, "No layer of regard computes", by_layers)


def _common_traits(layers: Iterable["LayerShape"]) -> list[str]:
    """The traits that all layers share, where there are several kinds of layers."""
    first, *others = (traits(layer) for layer in layers)
    return [each for each in first if others and all(each in other for other in others)]


def _summary(model: "ModelShape") -> str:
    parts = [
        f"{counted(len(model.layers), 'layer')} of {model.architecture}",
        f"hidden size {model.hidden_size:,}",
        model.dtype,
    ]
    if model.max_positions is not None:
        parts.append(f"made for {counted(model.max_positions, 'token')}")
    if model.weight_bytes is not None:
        parts.append(f"{readable_bytes(model.weight_bytes)} of weights")
    return ", ".join(parts)


def _cells(
    model: "ModelShape", layer: "LayerShape", indices: tuple[int, ...], every: Sequence[str]
) -> list[str]:
    numbers, widths = _parameters(layer), dict.fromkeys((layer.head_dim, layer.v_head_dim))
    own = [each for each in traits(layer) if each not in every]
    return [
        _few(indices),
        "; ".join((layer.kind, *own)),
        f"{layer.num_heads:,} on {layer.num_kv_heads:,}",
        " / ".join(f"{each:,}" for each in widths),
        "-" if numbers is None else f"{numbers:,}",
        f"{_token_bytes(model, layer):,}",
    ]


def traits(layer: "LayerShape") -> list[str]:
    """The traits of a layer besides its kind, in words.

    Examples:
        >>> from regard.plan import LayerShape
        >>> traits(LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8,
        ...     window=4096, sinks=True, rope="Rotary(8)"))
        ['window of 4,096', 'sinks']
    """
    found: list[tuple[Any, str]] = [
        (layer.kv_lora_rank, f"latent of {layer.kv_lora_rank or 0:,}"),
        (layer.kv_lora_rank and layer.qk_rope_head_dim, f"{layer.qk_rope_head_dim:,} with RoPE"),
        (layer.q_lora_rank, f"query latent of {layer.q_lora_rank or 0:,}"),
        (layer.window, f"window of {layer.window or 0:,}"),
        (layer.chunk, f"chunks of {layer.chunk or 0:,}"),
        (layer.state_elements, f"state of {layer.state_elements:,} numbers"),
        (not layer.causal, "not causal"),
        (not layer.rope and not layer.state_elements, "no RoPE"),
        (layer.keys_of is not None, f"keys of layer {layer.keys_of}"),
        (
            layer.tied_channels is not None,
            f"values are keys, {layer.tied_channels or 0:,} with RoPE",
        ),
        (layer.qk_norm, f"queries and keys normalised by {layer.qk_norm}"),
        (layer.query_scale, "queries scaled by position"),
        (layer.sinks, "sinks"),
        (layer.gate, f"gated by {layer.gate}"),
        (layer.softcap, f"softcap {layer.softcap}"),
        (layer.scale is not None, f"scale {layer.scale or 0:.6g}"),
        (layer.bias, f"biases of {', '.join(name.partition('_')[0] for name in layer.bias)}"),
    ]
    return [words for holds, words in found if holds]


def by_words(model: "ModelShape", words: Callable[["LayerShape"], str]) -> dict[str, list[int]]:
    """The indices of the layers that have the same words, without those that have none."""
    indices: dict[str, list[int]] = {}
    for index, layer in enumerate(model.layers):
        if words(layer):
            indices.setdefault(words(layer), []).append(index)
    return indices


def _totals(model: "ModelShape") -> list[str]:
    """Sentences about all layers together."""
    total = _all_parameters(model)
    sentences = []
    if total is not None:
        sentences.append(f"Attention has {counted(total, 'parameter')} in all.")
    if not any(layer.causal for layer in model.layers):
        return [*sentences, "Its layers see the whole input at once: there is no cache."]
    sentences.append(_growth(model))
    states = sum(_cache(model, layer, 1) for layer in model.layers if layer.kind == "linear")
    if states:
        sentences.append(f"States take {readable_bytes(states)}, however many tokens there are.")
    if (context := model.max_positions) is not None:
        whole = readable_bytes(cache_of(model, context) or 0)
        sentences.append(f"{context:,} tokens take {whole} in all.")
    return sentences


def _growth(model: "ModelShape") -> str:
    """A sentence on the bytes that a token adds to all caches, before and after windows are
    full."""
    bounded = [each for each in model.layers if each.window is not None or each.chunk is not None]
    every = sum(_token_bytes(model, layer) for layer in model.layers)
    sentence = f"A token takes {counted(every, 'byte')} of cache"
    if not (full := sum(_token_bytes(model, layer) for layer in bounded)):
        return f"{sentence}."
    caching = sum(_token_bytes(model, layer) > 0 for layer in bounded)
    return (
        f"{sentence}, and {every - full:,} once {counted(caching, 'layer')} hold as many tokens "
        "as they need."
    )


def _few(indices: Iterable[int]) -> str:
    """Indices as text: of many runs the first three and the last; `--json` has all of them."""
    runs = ranges(indices).split(", ")
    return ", ".join(runs if len(runs) <= SHOWN else [*runs[:3], "...", runs[-1]])


def shortened(code: str) -> str:
    """Code with its long lists cut to their first two numbers.

    Examples:
        >>> shortened("LongRope((1.0, 1.1, 1.2, 1.3, 1.4, 1.5), (2.0, 3.0))")
        'LongRope((1.0, 1.1, ... 6 numbers), (2.0, 3.0))'
    """
    return LONG_LIST.sub(
        lambda found: f"{found[1]}, ... {found[2].count(',') + 2} numbers{found[3]}", code
    )
