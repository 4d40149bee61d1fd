"""regard plan: what each attention that a model could have costs, from its sizes alone."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from regard.cli.layout import Column, tabulate
from regard.cli.terminal import remarks, say
from regard.page.readable import readable_bytes
from regard.plan.devices import THIS
from regard.plan.rows import Plan, Row
from regard.plan.shapes import distinct
from regard.words import counted

UNITS = (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40))
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
    (_print_every if every else _print_table)(found, console)
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


def _print_table(found: Plan, console: Console) -> None:
    """A line for each attention: its cache by storage; what fits, and times, with the first."""
    unit, scale = _unit(min(row.cost.cache_bytes for row in found.rows))
    by_attention: dict[str, list[Row]] = {}
    for row in found.rows:
        by_attention.setdefault(row.key, []).append(row)
    storages = list(dict.fromkeys(row.storage.name for row in found.rows))
    columns = [Column("attention", words=True)]
    columns += [*(Column(f"{storage}, {unit}") for storage in storages), *_measures(found)]
    cells = [
        [
            escape(rows[0].attention),
            *(_short(row.cost.cache_bytes / scale) for row in rows),
            *_measured(rows[0]),
        ]
        for rows in by_attention.values()
    ]
    tabulate(console, columns, cells)
    notes = []
    if len(storages) > 1:
        what = "Tokens and times are" if found.devices else "Tokens are"
        notes.append(f"{what} those of the {storages[0]} cache.")
    if found.devices:
        bounds = (f"{_bound(key)} on {each.name}" for key, each in found.devices.items())
        notes.append(f"Times: {'; '.join(bounds)}.")
    say(console, " ".join(notes), style="dim")


def _bound(device: str) -> str:
    return "about, as measured," if device == THIS else "at least,"


def _print_every(found: Plan, console: Console) -> None:
    """A line for each attention and storage: ideal bytes, allocated ones, and whole blocks."""
    unit, scale = _unit(min(row.cost.cache_bytes for row in found.rows))
    figures = ["ideal", "regard", *([f"blocks of {found.block:,}"] if found.block else [])]
    columns = [Column("attention", words=True), Column("cache", left=True), Column("weights, M")]
    columns += [Column(f"{figure}, {unit}") for figure in figures]
    cells = []
    for row in found.rows:
        sizes = (row.cost.cache_bytes, row.cost.allocated_bytes, row.block_bytes)
        shown = [_short(size / scale) for size in sizes if size is not None]
        weights = _short(row.cost.parameters / 1e6)
        named = [escape(row.attention), row.storage.name, weights]
        cells.append([*named, *shown, *_measured(row)])
    tabulate(console, [*columns, *_measures(found)], cells)


def _measures(found: Plan) -> list[Column]:
    """The columns of what fits, and of times on each device."""
    several = len(found.devices) > 1
    fits = Column(f"tokens in {readable_bytes(found.memory)}")
    return [fits, *(Column(f"decode{several * f' on {key}'}, ms") for key in found.devices)]


def _measured(row: Row) -> list[str]:
    return [_count(row.largest_context.ideal), *(_short(1e3 * each.seconds) for each in row.decode)]


def _print_sent(found: Plan, console: Console) -> None:
    """Print the bytes that a rank sends, which do not depend on the storage of its cache, and the
    times of each link."""
    columns = [Column("attention", words=True)]
    columns += [Column(f"sent: {work}", group="sent") for work in SENT.values()]
    for key in found.links:
        columns += [Column(f"{key}: {work}, ms", group=key) for work in SENT.values()]
    rows = list({row.key: row for row in found.rows}.values())
    cells = [
        [escape(row.attention), *(readable_bytes(getattr(row.sent, name)) for name in SENT)]
        + [_short(1e3 * getattr(each, name)) for each in row.transfers for name in SENT]
        for row in rows
    ]
    tabulate(console, columns, cells)


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
    sentence = f"{size}; {memory} holds {_count(first.largest_context.ideal)} tokens"
    least = min(own, key=_bytes)
    if least is not first:
        tokens = _count(least.largest_context.ideal)
        sentence += f", or {tokens} with {least.storage.name}, which needs no conversion"
    sentences = [f"{sentence}."]
    if others:
        least = min(others, key=_bytes)
        sentences.append(
            f"The smallest conversion, {least.attention} with {least.storage.name}, holds "
            f"{_count(least.largest_context.ideal)}."
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
    """How bytes and times are counted."""
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
        sentences += _sent(found)
    return sentences + list(found.model.remarks)


def _sent(found: Plan) -> list[str]:
    """Sentences on the rank and the bytes that are counted, and on the rates of each link."""
    rank = found.rows[0].sent.rank
    counted_rank = f"; rank {rank}, which sends most" if found.cp > 1 else ""
    sentences = [
        f"a rank sends: to the others, for its attention{counted_rank}; to train is a forward and "
        "a backward pass, without the sums of the weights' gradients."
        + (" With split heads each MLP adds one more sum of the outputs." if found.tp > 1 else "")
    ]
    return sentences + [
        f"ms {key}: at least, of {link.name} and nothing else, {link.bytes_per_second / 1e9:,.3g} "
        f"GB/s a rank in each direction and {1e6 * link.latency:.2g} us for each step "
        f"({link.source})."
        for key, link in found.links.items()
    ]


def _unit(size: int) -> tuple[str, int]:
    """The largest unit of which there is at least one."""
    return next((unit for unit in reversed(UNITS) if size >= unit[1]), UNITS[0])


def _short(value: float) -> str:
    """Three digits; of large numbers all before the point."""
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:,.3g}" if value >= 1e-3 else f"{value:.0e}"


def _count(value: int | None) -> str:
    return "any" if value is None else f"{value:,}"


def as_data(found: Plan) -> dict[str, Any]:
    """A plan as data for JSON: layers that are alike are listed once."""
    model = asdict(found.model)
    del model["layers"]
    return {
        "model": model | {"num_layers": len(found.model.layers)},
        **{name: getattr(found, name) for name in ("context", "batch", "memory", "dtype")},
        **{name: getattr(found, name) for name in ("tp", "cp", "block")},
        "devices": {key: asdict(device) for key, device in found.devices.items()},
        "links": {key: asdict(link) for key, link in found.links.items()},
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
