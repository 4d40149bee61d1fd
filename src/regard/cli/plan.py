"""regard plan: what each attention that a model could have costs, from its sizes alone."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from regard.cli.layout import tabulate
from regard.cli.terminal import remarks, say
from regard.page.readable import readable_bytes
from regard.plan.devices import THIS
from regard.plan.rows import Plan, Row, fits
from regard.plan.shapes import distinct
from regard.words import counted

SENT = {"decode": "a token", "prefill": "prefill", "training": "training"}
MEASURE = "--device this is this machine, whose rates `regard tune` measures"


def show(found: Plan, console: Console, *, every: bool = False, why: bool = False) -> None:
    """Print a plan as wide as the console: a table, what fits, and what to ask next.

    Args:
        found: the plan.
        console: as wide as the table may be.
        every: whether each way of storing the cache has a line, with the bytes that regard
            allocates and whole blocks take.
        why: whether sentences say how figures are counted, and why attentions are missing.
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


def _heading(found: Plan) -> str:
    model, memory = found.model, readable_bytes(found.memory)
    layers = counted(len(model.layers), "layer")
    tokens = f"{counted(found.context, 'token')} in {counted(found.batch, 'row')}"
    parts = [f"{model.name}: {layers}, {found.dtype}; {tokens}"]
    if found.tp > 1 or found.cp > 1:
        parts.append(f"of one rank of {found.tp} x {found.cp}")
    weights = model.weight_bytes
    taken = "" if weights is None else f" (the weights take {readable_bytes(weights)})"
    return "; ".join([*parts, f"{memory} for the cache alone{taken}"]) + "."


def _print_table(found: Plan, console: Console, every: bool) -> None:
    heads, rows = found.table(every)
    tabulate(console, heads, [list(map(escape, row)) for row in rows])
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
    return "about, as measured," if device == THIS else "at least,"


def _print_sent(found: Plan, console: Console) -> None:
    """Print the bytes that a rank sends, which do not depend on the storage of its cache."""
    heads = ["attention", *(f"sent: {work}" for work in SENT.values())]
    rows = list({row.key: row for row in found.rows}.values())
    cells = [
        [escape(row.attention), *(readable_bytes(getattr(row.sent, name)) for name in SENT)]
        for row in rows
    ]
    tabulate(console, heads, cells)


def _verdict(found: Plan) -> list[str]:
    """Sentences on the bytes of the first row, and on the contexts that fit with other storages and
    other attentions."""
    first, memory = found.rows[0], readable_bytes(found.memory)
    own = [row for row in found.rows if row.key == first.key]
    others = [row for row in found.rows if row.key != first.key]
    named = "as shipped" if first.key == "shipped" else f"with {first.attention}"
    tokens = f"{counted(found.context, 'token')} in {counted(found.batch, 'row')}"
    size = f"{tokens} take {readable_bytes(first.cost.cache_bytes)} {named}"
    if first.cost.cache_bytes > found.memory:
        storages = dict.fromkeys(row.storage.name for row in own if _fits(found, row))
        names = dict.fromkeys(row.attention for row in others if _fits(found, row))
        fitting = [f"with {', '.join(storages)}"] * bool(storages)
        fitting += [f"converted to {'; '.join(names)}"] * bool(names)
        what = f"They fit {', or '.join(fitting)}" if fitting else "Nothing here fits"
        return [f"{size}, more than {memory}. {what}."]
    sentence = f"{size}; {memory} holds {fits(first)} tokens"
    least = min(own, key=_bytes)
    if least is not first:
        tokens = fits(least)
        sentence += f", or {tokens} with {least.storage.name}, which needs no conversion"
    sentences = [f"{sentence}."]
    if others:
        least = min(others, key=_bytes)
        sentences.append(
            f"The smallest conversion, {least.attention} with {least.storage.name}, holds "
            f"{fits(least)}."
        )
    if any(row.cost.uncounted for row in found.rows):
        sentences.append("Linear attention: its state is counted, its work and parameters are not.")
    return sentences


def _fits(found: Plan, row: Row) -> bool:
    return row.cost.cache_bytes <= found.memory


def _bytes(row: Row) -> int:
    return row.cost.cache_bytes


def _next(found: Plan, every: bool) -> str:
    """A sentence that names the options and the command that tell more."""
    parts = ["regard compare measures the quality and speed of each"]
    if not every:
        parts.append("--all: what regard allocates. --block 16: what whole blocks take")
    if not found.devices:
        parts.append("--device h100 or this: times")
    missing = f", and why {'; '.join(found.left_out)} are missing" if found.left_out else ""
    parts.append(f"--why: how it is counted{missing}")
    return f"Next: {'. '.join(parts)}."


def _explained(found: Plan) -> list[str]:
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


def _sent(found: Plan) -> str:
    """A sentence on the rank and the bytes that are counted."""
    rank = found.rows[0].sent.rank
    counted_rank = f"; rank {rank}, which sends most" if found.cp > 1 else ""
    return (
        f"a rank sends: to the others, for its attention{counted_rank}; to train is a forward and "
        "a backward pass, without the sums of the weights' gradients."
        + (" With split heads each MLP adds one more sum of the outputs." if found.tp > 1 else "")
    )


def as_data(found: Plan) -> dict[str, Any]:
    """A plan as data for JSON: layers that are alike are listed once."""
    model = asdict(found.model)
    del model["layers"]
    return {
        "model": model | {"num_layers": len(found.model.layers)},
        **{name: getattr(found, name) for name in ("context", "batch", "memory", "dtype")},
        **{name: getattr(found, name) for name in ("tp", "cp", "block")},
        "devices": {key: asdict(device) for key, device in found.devices.items()},
        "rows": [_row_data(row) for row in found.rows],
        "left_out": dict(found.left_out),
    }


def _row_data(row: Row) -> dict[str, Any]:
    data = {name: value for name, value in asdict(row).items() if name != "layers"}
    data["cost"] |= {
        "prefill_intensity": row.cost.prefill_intensity,
        "decode_intensity": row.cost.decode_intensity,
    }
    data["layers"] = [
        {"indices": list(indices), "kind": layer.kind, **asdict(layer)}
        for layer, indices in distinct(row.layers).items()
    ]
    return data
