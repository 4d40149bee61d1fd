"""regard plan: what each attention that a model could have costs, from its sizes alone."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from regard.cli.layout import Column, tabulate
from regard.cli.terminal import print_json, remarks, say, stdout
from regard.plan.devices import Device
from regard.plan.engines import ENGINES
from regard.plan.from_sizes import model_from_sizes
from regard.plan.planning import GIBIBYTE, formulas_of, plan
from regard.plan.rows import Duration, Plan, Row
from regard.plan.shapes import LayerShape, ModelShape
from regard.words import counted

TABLE = 80  # columns of a table where stdout is a file or a pipe
UNITS = (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40))
SENT = {"decode": "decode a token", "prefill": "prefill", "training": "train"}
MEASURE = "--device this is this machine, whose rates `regard tune` measures"


def run(
    *,
    model: Path | None,
    num_heads: int | None,
    hidden_size: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    v_head_dim: int | None,
    num_layers: int | None,
    kv_lora_rank: int | None,
    q_lora_rank: int | None,
    qk_rope_head_dim: int | None,
    window: int | None,
    context: int,
    batch: int,
    memory: float,
    device: Sequence[str] | None,
    dtype: str | None,
    tp: int,
    cp: int,
    link: Sequence[str] | None,
    engine: str,
    attention: Sequence[str] | None,
    storage: Sequence[str] | None,
    page_size: int,
    formula: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Plan, and print a table or JSON; write a page."""
    sizes = {
        "num_heads": num_heads,
        "hidden_size": hidden_size,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "kv_lora_rank": kv_lora_rank,
        "q_lora_rank": q_lora_rank,
        "qk_rope_head_dim": qk_rope_head_dim,
        "window": window,
    }
    shape = _model(model, num_layers, dtype, sizes)
    found = plan(
        shape,
        context=context,
        batch=batch,
        memory=max(1, int(memory * GIBIBYTE)),
        devices=device or (),
        dtype=dtype,
        tp=tp,
        cp=cp,
        links=link or (),
        engine=engine,
        attentions=attention or (),
        storages=storage or (),
        page_size=page_size,
    )
    _output(found, formula, html, as_json)


def _output(found: Plan, formula: bool, html: Path | None, as_json: bool) -> None:
    """Write the page, if one was asked for; print a table or JSON."""
    if html is not None:
        from regard.see.pages.curves import write_plan

        write_plan(found, html)
    if as_json:
        print_json(as_data(found, formula))
        return
    console = stdout(TABLE)
    show(found, console)
    if formula:
        show_formulas(found, console)
    if html is not None:
        say(console, f"written to {html}")


def _model(
    path: Path | None, num_layers: int | None, dtype: str | None, sizes: dict[str, Any]
) -> ModelShape:
    if path is not None:
        from regard.plan.describing import describe

        return describe(path)
    return model_from_sizes(num_layers=num_layers or 1, dtype=dtype or "float32", **sizes)


def show(found: Plan, console: Console) -> None:
    """Print a plan as a table, as wide as the console."""
    say(console, _heading(found), bold=found.model.name)
    console.print()
    _print_table(found, console)
    if found.tp * found.cp > 1:
        console.print()
        _print_sent(found, console)
    remarks(console, "Left out", dict(found.left_out))
    remarks(console, f"Not in {ENGINES[found.engine].name}", _objections(found))
    console.print()
    for sentence in _explained(found):
        say(console, sentence, style="dim")


def _heading(found: Plan) -> str:
    model = found.model
    layers = counted(len(model.layers), "layer")
    parts = [
        f"{model.name}: {layers}, {found.dtype}; {counted(found.context, 'token')} in "
        f"{counted(found.batch, 'row')}"
    ]
    if found.tp > 1 or found.cp > 1:
        parts.append(f"of one rank of {found.tp} x {found.cp}")
    weights = (
        "" if model.weight_bytes is None else f" (the weights take {_size(model.weight_bytes)})"
    )
    parts.append(f"{_size(found.memory)} for the cache alone{weights}")
    return "; ".join(parts) + "."


def _print_table(found: Plan, console: Console) -> None:
    unit, scale = _unit(min(row.cost.cache_bytes for row in found.rows))
    engine = found.engine.partition("-")[0]
    heads = [
        f"ideal {unit}",
        f"regard {unit}",
        f"{engine} {unit}",
        f"tokens in {_size(found.memory)}",
    ]
    columns = [Column("attention", words=True), Column("cache", left=True)]
    columns += [Column("params M"), *map(Column, heads)]
    columns += [Column(f"decode ms {key}") for key in found.devices]
    tabulate(console, columns, [_cells(found, row, scale) for row in found.rows])


def _cells(found: Plan, row: Row, scale: int) -> list[str]:
    reserved = row.reserved_by(found.engine).bytes
    sizes = (row.cost.cache_bytes, row.cost.allocated_bytes, reserved)
    return [
        escape(row.attention),
        row.storage.name,
        _short(row.cost.parameters / 1e6),
        *("-" if size is None else _short(size / scale) for size in sizes),
        _count(row.largest_context.ideal),
        *(_short(1e3 * each.seconds) for each in row.decode),
    ]


def _print_sent(found: Plan, console: Console) -> None:
    """What a rank sends, whatever the storage of its cache."""
    columns = [Column("attention", words=True), Column("to", left=True), Column("a rank sends")]
    columns += [Column(f"ms {key}") for key in found.links]
    rows = list({row.key: row for row in found.rows}.values())
    cells = [
        [escape(row.attention), work, _size(getattr(row.sent, name))]
        + [_short(1e3 * getattr(each, name)) for each in row.transfers]
        for row in rows
        for name, work in SENT.items()
    ]
    tabulate(console, columns, cells)


def _objections(found: Plan) -> dict[str, str]:
    """Why the plan's engine cannot hold some rows' caches, by attention and storages."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in found.rows:
        objection = row.reserved_by(found.engine).objection
        if objection:
            names.setdefault((row.attention, objection), []).append(row.storage.name)
    return {
        f"{attention} ({', '.join(storages)})": objection
        for (attention, objection), storages in names.items()
    }


def _explained(found: Plan) -> list[str]:
    """What the columns are, and what fits."""
    engine = ENGINES[found.engine]
    sentences = [
        "ideal: the tokens that are needed, and no more. regard: the buffers of its caches, which "
        f"double when they are full. {engine.name}: {engine.rule} ({engine.source}).",
        _fitting(found),
    ]
    if not found.devices:
        sentences.append(f"Times: no device was named. {MEASURE}; --device h100 names another.")
    sentences += [_device(found, key, device) for key, device in found.devices.items()]
    if found.tp * found.cp > 1:
        sentences += _sent(found)
    if any(row.cost.uncounted for row in found.rows):
        sentences.append("Linear attention: its state is counted, its work and parameters are not.")
    return sentences + list(found.model.remarks)


def _fitting(found: Plan) -> str:
    row, engine = found.rows[0], ENGINES[found.engine].name
    contexts, batches = row.largest_context, row.largest_batch
    held = row.reserved_by(found.engine).bytes is not None
    named = f"{row.attention}, {row.storage.name}"
    return (
        f"{_size(found.memory)} holds, of {named}: {_count(contexts.ideal)} tokens ideally, "
        f"{_count(contexts.allocated)} in regard's cache"
        + (f", {_count(contexts.reserved)} in {engine}" if held else "")
        + f"; rows of {found.context:,} tokens: {_count(batches.ideal)} ideally, "
        f"{_count(batches.allocated)} in regard's cache"
        + (f", {_count(batches.reserved)} in {engine}" if held else "")
        + ". Found by search."
    )


def _device(found: Plan, key: str, device: Device) -> str:
    rate = device.flops[found.dtype]
    measured = key == "this"
    return (
        f"decode ms {key}: {'about' if measured else 'at least'}, the attention of one step on "
        f"{device.name}, {device.memory_bandwidth / 1e9:,.0f} GB/s and {rate / 1e12:,.3g} TFLOP/s "
        f"in {found.dtype} ({device.source}). Decoding is bound by "
        f"{_bounds(found, 'decode', key)}; prefill by {_bounds(found, 'prefill', key)}."
    )


def _sent(found: Plan) -> list[str]:
    """Which rank and which bytes, and what its links do in a second."""
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


def _bounds(found: Plan, phase: str, key: str) -> str:
    """What bounds most rows, then the others with their attentions."""
    by_bound: dict[str, list[str]] = {}
    for row in found.rows:
        by_bound.setdefault(_of(getattr(row, phase), key).bound, []).append(row.attention)
    most, *others = sorted(by_bound.items(), key=lambda each: -len(each[1]))
    named = (f" (by {bound}: {'; '.join(dict.fromkeys(rows))})" for bound, rows in others)
    return most[0] + "".join(named)


def _of(durations: Sequence[Duration], key: str) -> Duration:
    return next(each for each in durations if each.device == key)


def show_formulas(found: Plan, console: Console) -> None:
    """Print the formulas of each row's different layers, with the numbers put in."""
    for row in found.rows:
        console.print()
        say(console, f"{row.attention}, {row.storage.name}", style="bold")
        for layer, indices, written in formulas_of(found, row):
            say(console, f"{_kind(layer)}: {counted(len(indices), 'layer')}", indent=2)
            for name, text in written.items():
                say(console, f"{name.replace('_', ' ')} = {text}", indent=4)


def _kind(layer: LayerShape) -> str:
    extra = [f"{name} {value:,}" for name in ("window", "chunk") if (value := getattr(layer, name))]
    return ", ".join([layer.kind, *extra])


def _unit(size: int) -> tuple[str, int]:
    """The largest unit of which there is at least one."""
    return next((unit for unit in reversed(UNITS) if size >= unit[1]), UNITS[0])


def _size(size: int) -> str:
    if size < UNITS[0][1]:
        return counted(size, "byte")
    unit, scale = _unit(size)
    return f"{_short(size / scale)} {unit}"


def _short(value: float) -> str:
    """Three digits; of large numbers all before the point."""
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:,.3g}" if value >= 1e-3 else f"{value:.0e}"


def _count(value: int | None) -> str:
    return "any" if value is None else f"{value:,}"


def as_data(found: Plan, formula: bool = False) -> dict[str, Any]:
    """A plan as data for JSON: layers that are alike are listed once."""
    model = asdict(found.model)
    del model["layers"]
    return {
        "model": model | {"num_layers": len(found.model.layers)},
        **{name: getattr(found, name) for name in ("context", "batch", "memory", "dtype")},
        **{name: getattr(found, name) for name in ("tp", "cp", "engine")},
        "engines": {
            key: {"name": engine.name, "rule": engine.rule, "source": engine.source}
            for key, engine in ENGINES.items()
        },
        "devices": {key: asdict(device) for key, device in found.devices.items()},
        "links": {key: asdict(link) for key, link in found.links.items()},
        "rows": [_row_data(found, row, formula) for row in found.rows],
        "left_out": dict(found.left_out),
    }


def _row_data(found: Plan, row: Row, formula: bool) -> dict[str, Any]:
    data = {name: value for name, value in asdict(row).items() if name != "layers"}
    data["cost"] |= {
        "prefill_intensity": row.cost.prefill_intensity,
        "decode_intensity": row.cost.decode_intensity,
    }
    data["layers"] = [
        {"indices": list(indices), "kind": layer.kind, **asdict(layer)}
        | ({"formulas": written} if formula else {})
        for layer, indices, written in formulas_of(found, row)
    ]
    return data
