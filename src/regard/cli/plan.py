"""regard plan: what each attention that a model could have costs, from its sizes alone."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from regard.cli import options
from regard.cli.layout import tabulate
from regard.cli.options import named, option, size
from regard.cli.terminal import print_json, remarks, say, stdout
from regard.names import STORAGES, UNCHANGED
from regard.page.readable import readable_bytes
from regard.words import counted

if TYPE_CHECKING:
    from regard.plan import ModelShape, Plan, Row

SIZES = (
    *("num_heads", "hidden_size", "num_kv_heads", "head_dim", "v_head_dim", "num_layers"),
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "window"),
)
GIBIBYTE = 1 << 30
SENT = {"decode": "a token", "prefill": "prefill", "training": "training"}
MEASURE = "--device this is this machine, whose rates `regard tune` measures"


@options.verb
def plan(
    model: options.ModelOrSizes = None,
    num_heads: options.NumHeads = None,
    hidden_size: int | None = size(None, "Channels of the hidden states."),
    num_kv_heads: options.NumKVHeads = None,
    head_dim: int | None = size(None, "Channels of a query; hidden size / heads if left out."),
    v_head_dim: options.ValueDim = None,
    num_layers: int | None = size(None, "Layers; 1 if left out."),
    kv_lora_rank: int | None = size(None, "Of MLA: channels of its latent."),
    q_lora_rank: int | None = size(None, "Of MLA: channels of its query latent."),
    qk_rope_head_dim: int | None = size(
        None, "Channels with RoPE; a whole head if left out.", least=0
    ),
    window: int | None = size(None, "Keys that a query sees at most."),
    context: int = size(4096, "Tokens of the prefill and in the cache."),
    batch: options.Batch = 1,
    memory: float = option(1.0, "GiB for the cache alone, of each rank, for what fits."),
    device: list[str] | None = option(
        None, "Whose times are listed: a GPU, as h100, or `this` machine; repeatable."
    ),
    dtype: options.AnyDtype | None = option(
        None, "Of weights and plain caches; the model's if left out."
    ),
    tp: int = size(1, "Ranks that share the heads."),
    cp: int = size(1, "Ranks that share the tokens."),
    block: int = size(0, "As --all, in whole blocks of this many tokens; vLLM has 16.", least=0),
    attention: list[str] | None = option(
        None, "A row: shipped, mha, gqa-4, mqa, deepseek-50, latent-50; repeatable."
    ),
    storage: list[str] | None = named(
        None, STORAGES, "How caches store keys and values: {}; may be repeated.", also=UNCHANGED
    ),
    page_size: int = size(0, "Tokens of a page of a PagePool; 0: caches without pages.", least=0),
    every: bool = option(False, "Every way of storing the cache: what is allocated.", "--all"),
    why: bool = option(False, "How figures are counted, and why rows are missing.", "--why"),
    html: Path | None = option(None, "Write curves as a page."),
    as_json: options.Json = False,
) -> None:
    """Costs of each attention that a model could have: cache, time, and the context that fits."""
    sizes = {name: value for name, value in locals().items() if name in SIZES and value is not None}
    options.check_source(model, sizes, "num_heads", "hidden_size")
    options.check_memory(memory)
    options.start("regard.plan.planning")
    from regard.plan.planning import plan as plan_model

    found = plan_model(
        _shape(model, sizes, dtype),
        context=context,
        batch=batch,
        memory=max(1, int(memory * GIBIBYTE)),
        devices=device or (),
        dtype=dtype,
        tp=tp,
        cp=cp,
        block=block,
        attentions=attention or (),
        storages=storage or (),
        page_size=page_size,
    )
    if html is not None:
        from regard.see.pages.curves import write_plan

        write_plan(found, html)
    if as_json:
        print_json(as_data(found))
        return
    show(found, stdout(80), every=every or block > 0, why=why)
    if html is not None:
        say(stdout(80), f"written to {html}")


def _shape(model: Path | None, sizes: dict[str, Any], dtype: str | None) -> "ModelShape":
    """The shapes of a model, or of one with these sizes."""
    if model is None:
        from regard.plan.from_sizes import model_from_sizes

        return model_from_sizes(**sizes, dtype=dtype or "float32")
    from regard.plan.describing import describe  # imports transformers

    return describe(model)


def show(found: "Plan", console: Console, *, every: bool = False, why: bool = False) -> None:
    """Print a plan as wide as the console: a table, what fits, and what to ask next.

    With `every`, each way of storing the cache has a line, with the bytes that regard allocates and
    whole blocks take; with `why`, sentences say how figures are counted, and why attentions are
    missing.
    """
    say(console, _heading(found), bold=found.model.name)
    console.print()
    _print_table(found, console, every)
    if found.tp * found.cp > 1:
        console.print()
        _print_sent(found, console)
    console.print()
    for sentence in _verdict(found):
        say(console, sentence)
    if not why:
        say(console, _next(found, every), style="dim")
        return
    remarks(console, "Left out", dict(found.left_out))
    console.print()
    for sentence in _explained(found):
        say(console, sentence, style="dim")


def _heading(found: "Plan") -> str:
    model, memory = found.model, readable_bytes(found.memory)
    layers = counted(len(model.layers), "layer")
    tokens = f"{counted(found.context, 'token')} in {counted(found.batch, 'row')}"
    parts = [f"{model.name}: {layers}, {found.dtype}; {tokens}"]
    if found.tp > 1 or found.cp > 1:
        parts.append(f"of one rank of {found.tp} x {found.cp}")
    weights = model.weight_bytes
    taken = "" if weights is None else f" (the weights take {readable_bytes(weights)})"
    return "; ".join([*parts, f"{memory} for the cache alone{taken}"]) + "."


def _print_table(found: "Plan", console: Console, every: bool) -> None:
    tabulate(console, *found.table(every))
    if every:
        return
    notes, storages = [], dict.fromkeys(row.storage.name for row in found.rows)
    if len(storages) > 1:
        what = "Tokens and times are" if found.devices else "Tokens are"
        notes.append(f"{what} those of the {next(iter(storages))} cache.")
    if found.devices:
        bounds = (f"{_bound(key)} on {each.name}" for key, each in found.devices.items())
        notes.append(f"Times: {'; '.join(bounds)}.")
    say(console, " ".join(notes), style="dim")


def _bound(device: str) -> str:
    from regard.plan.devices import THIS

    return "about, as measured," if device == THIS else "at least,"


def _print_sent(found: "Plan", console: Console) -> None:
    """Print the bytes that a rank sends, which do not depend on the storage of its cache."""
    heads = ["attention", *(f"sent: {work}" for work in SENT.values())]
    rows = list({row.key: row for row in found.rows}.values())
    cells = [
        [row.attention, *(readable_bytes(getattr(row.sent, name)) for name in SENT)] for row in rows
    ]
    tabulate(console, heads, cells)


def _verdict(found: "Plan") -> list[str]:
    """Sentences on the bytes of the first row, and on the contexts that fit with other storages and
    other attentions."""
    first, memory = found.rows[0], readable_bytes(found.memory)
    own = [row for row in found.rows if row.key == first.key]
    others = [row for row in found.rows if row.key != first.key]
    named = "as shipped" if first.key == "shipped" else f"with {first.attention}"
    tokens = f"{counted(found.context, 'token')} in {counted(found.batch, 'row')}"
    size = f"{tokens} take {readable_bytes(first.cost.cache_bytes)} {named}"
    if first.cost.cache_bytes > found.memory:
        inside = [row for row in found.rows if row.cost.cache_bytes <= found.memory]
        storages = dict.fromkeys(row.storage.name for row in inside if row in own)
        names = dict.fromkeys(row.attention for row in inside if row in others)
        fitting = [f"with {', '.join(storages)}"] * bool(storages)
        fitting += [f"converted to {'; '.join(names)}"] * bool(names)
        what = f"They fit {', or '.join(fitting)}" if fitting else "Nothing here fits"
        return [f"{size}, more than {memory}. {what}."]
    sentence = f"{size}; {memory} holds {first.fitting} tokens"
    least, *smaller = (
        min(rows, key=lambda row: row.cost.cache_bytes) for rows in (own, others) if rows
    )
    if least is not first:
        with_storage = f"{least.fitting} with {least.storage.name}"
        sentence += f", or {with_storage}, which needs no conversion"
    sentences = [f"{sentence}."]
    sentences += [
        f"The smallest conversion, {row.attention} with {row.storage.name}, holds {row.fitting}."
        for row in smaller
    ]
    if any(row.cost.uncounted for row in found.rows):
        sentences.append("Linear attention: its state is counted, its work and parameters are not.")
    return sentences


def _next(found: "Plan", every: bool) -> str:
    """A sentence that names the options and the command that tell more."""
    parts = ["regard compare measures the quality and speed of each"]
    if not every:
        parts.append("--all: what regard allocates. --block 16: what whole blocks take")
    if not found.devices:
        parts.append("--device h100 or this: times")
    missing = f", and why {'; '.join(found.left_out)} are missing" if found.left_out else ""
    parts.append(f"--why: how it is counted{missing}")
    return f"Next: {'. '.join(parts)}."


def _explained(found: "Plan") -> list[str]:
    """Sentences on how bytes and times are counted."""
    sentences = [
        "ideal: the tokens that are needed, and no more. regard: the buffers of its caches, which "
        "double when they are full."
    ]
    if found.block:
        sentences.append(
            f"blocks of {found.block:,}: as serving engines reserve them, whole blocks of "
            f"{counted(found.block, 'token')}; of a window those that it can touch while decoding."
        )
    if not found.devices:
        sentences.append(f"Times: no device was named. {MEASURE}; --device h100 names another.")
    for at, (key, device) in enumerate(found.devices.items()):
        row, rate = found.rows[0], device.flops[found.dtype]
        sentences.append(
            f"decode, ms: {_bound(key)} the attention of one step on {device.name}, "
            f"{device.memory_bandwidth / 1e9:,.0f} GB/s and {rate / 1e12:,.3g} TFLOP/s in "
            f"{found.dtype} ({device.source}). Of {row.attention}, decoding is bound by "
            f"{row.decode[at].bound}, prefill by {row.prefill[at].bound}."
        )
    if found.tp * found.cp > 1:
        sentences.append(_sent(found))
    return sentences + list(found.model.remarks)


def _sent(found: "Plan") -> str:
    """A sentence on the rank and the bytes that are counted."""
    rank = found.rows[0].sent.rank
    counted_rank = f"; rank {rank}, which sends most" if found.cp > 1 else ""
    return (
        f"a rank sends: to the others, for its attention{counted_rank}; to train is a forward and "
        "a backward pass, without the sums of the weights' gradients."
        + (" With split heads each MLP adds one more sum of the outputs." if found.tp > 1 else "")
    )


def as_data(found: "Plan") -> dict[str, Any]:
    """A plan as data for JSON: layers that are alike are listed once."""
    data = asdict(found) | {"rows": [_row_data(row, found.model) for row in found.rows]}
    data["model"]["num_layers"] = len(data["model"].pop("layers"))
    return data


def _row_data(row: "Row", model: "ModelShape") -> dict[str, Any]:
    data = asdict(row)
    data["cost"] |= {
        "prefill_intensity": row.cost.prefill_intensity,
        "decode_intensity": row.cost.decode_intensity,
    }
    data["layers"] = [
        {"indices": list(indices), "kind": layer.kind, **asdict(layer)}
        for layer, indices in replace(model, layers=row.layers).distinct().items()
    ]
    return data
