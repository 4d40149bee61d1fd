"""Every attention that a model could have, with what it costs and the context that fits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from regard.plan.candidates import Choice, choices
from regard.plan.communication import Sent, sent_formulas, sent_of
from regard.plan.cost import Cost, block_bytes, cost_of, formulas, total_of
from regard.plan.devices import THIS, Device, device_of, is_measured, roofline_seconds
from regard.plan.formula import Formula, Number
from regard.plan.links import link_of, link_seconds
from regard.plan.rows import Duration, Largest, Plan, Row, Transfer
from regard.plan.sent_tokens import layout_of
from regard.plan.shapes import DTYPE_BYTES, LayerShape, ModelShape, Storage, storages_of
from regard.plan.sizes import sizes

GIBIBYTE = 1 << 30
MOST = {  # the largest numbers that are accepted: sums of bytes stay below 2**63 for real models
    "context": 10**12,
    "batch": 10**9,
    "tp": 10**6,
    "cp": 10**6,
    "memory": 10**18,
}
Parts = Sequence[tuple[int, Formula, dict[str, Number]]]  # layers alike, their cost, its numbers
TIMED = {"prefill": "visible_prefill_flops", "decode": "visible_decode_flops"}


def plan(
    model: ModelShape,
    *,
    context: int = 4096,
    batch: int = 1,
    memory: int = GIBIBYTE,
    devices: Sequence[str] = (),
    links: Sequence[str] = (),
    dtype: str | None = None,
    tp: int = 1,
    cp: int = 1,
    block: int = 0,
    attentions: Sequence[str] = (),
    storages: Sequence[str] = (),
    page_size: int = 0,
) -> Plan:
    """What each attention of a model would cost, with plain caches and with caches of codes.

    Args:
        model: from `describe`, or made of `LayerShape`s.
        context: tokens of a prefill, and in the cache of a decode step.
        batch: rows.
        memory: bytes, of each rank, for the cache alone.
        devices: keys of `DEVICES`, or `"this"`, which is this machine; if there are none,
            this machine if its rates are stored.
        links: keys of `LINKS`, between the ranks.
        dtype: of weights, activations and plain caches; the model's own if None.
        tp: ranks that the heads are divided among.
        cp: ranks that the tokens are divided among.
        block: tokens of a block: what whole blocks take stands beside the two other figures, as
            serving engines reserve them; 0 for no blocks.
        attentions: keys of rows, as `"gqa-4"`; all if there are none.
        storages: names of `STORAGES`, as `"K8V4"`; the usual ones if there are none.
        page_size: tokens of a page of the caches; 0 for caches that are not in pages.

    Raises:
        ValueError: if a number is out of its range, a name is not known, or the model is an
            encoder.

    Examples:
        >>> from regard.plan.planning import plan
        >>> from regard.plan.shapes import LayerShape, ModelShape
        >>> layer = LayerShape(
        ...     hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=8, v_head_dim=8)
        >>> model = ModelShape(name="m", architecture="llama", layers=(layer,), hidden_size=64)
        >>> row = plan(model, context=100, memory=51_200, devices=["h100"]).rows[0]
        >>> row.attention, row.cost.cache_bytes, row.largest_context.ideal
        ('GQA-4, as shipped', 25600, 200)
    """
    given = {"context": context, "batch": batch, "tp": tp, "cp": cp, "memory": memory}
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST[name]:
            raise ValueError(f"{name} is a whole number from 1 to {MOST[name]:,}, got {value!r}")
    if not any(layer.causal for layer in model.layers):
        raise ValueError(
            f"{model.name} is an encoder: it computes all tokens at once and has no cache to plan; "
            "regard describe lists its layers"
        )
    chosen = dtype or model.dtype
    if chosen not in DTYPE_BYTES:
        raise ValueError(f"dtype={chosen!r} is not one of {', '.join(DTYPE_BYTES)}")
    for name, value in {"page_size": page_size, "block": block}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} is a whole number, 0 or more tokens, got {value!r}")
    if page_size and block:
        raise ValueError(
            f"pages are blocks of their own: give page_size={page_size} or block={block}, not both"
        )
    stored = storages_of(storages, page_size)
    found, missing = choices(replace(model, dtype=chosen))
    settings = Plan(
        model=model,
        context=context,
        batch=batch,
        memory=memory,
        dtype=chosen,
        tp=tp,
        cp=cp,
        devices=_devices(devices, chosen),
        links={key: link_of(key) for key in links},
        block=block,
        rows=(),
        left_out={} if attentions else missing,
    )
    rows = tuple(
        _row(settings, choice, storage)
        for choice in _selected(found, attentions)
        for storage in stored
    )
    return Plan(**{**vars(settings), "rows": rows})


def largest(taken: Callable[[int], int], memory: int, most: int = MOST["context"]) -> int | None:
    """The largest whole number whose bytes fit the memory: bracketed by doubling steps from where
    it would be if bytes grew linearly, then found by bisection.

    Args:
        taken: bytes of a number; they never fall when it grows.
        memory: bytes.
        most: where the search ends.

    Returns:
        0 if 1 does not fit; None if `most` fits.

    Examples:
        >>> from regard.plan.planning import largest
        >>> largest(lambda tokens: tokens * tokens, 50)
        7
    """
    if taken(1) > memory:
        return 0
    linear = min(memory // max(taken(1), 1), most)
    fitting, step = linear if linear > 1 and taken(linear) <= memory else 1, 1
    while fitting < most and taken(min(fitting + step, most)) <= memory:
        fitting, step = min(fitting + step, most), 2 * step
    if fitting == most:
        return None
    beyond = min(fitting + step, most)
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        if taken(middle) <= memory:
            fitting = middle
        else:
            beyond = middle
    return fitting


def formulas_of(plan: Plan, row: Row) -> list[tuple[LayerShape, tuple[int, ...], dict[str, str]]]:
    """Of each different layer of a row: the indices of those like it, and each cost's formula with
    the numbers put in; `block_bytes` is there if the plan has blocks, and `sent_prefill` and others
    are of the rank that sends most."""
    alike = ModelShape(
        name=row.key, architecture="", layers=row.layers, hidden_size=plan.model.hidden_size
    ).distinct()
    found, layout = [], layout_of(row.layers)
    for layer, indices in alike.items():
        numbers = _numbers(plan, layer, row.storage)
        written = {
            name: formula.with_numbers(**numbers)
            for name, formula in formulas(layer, row.storage).items()
        }
        if plan.block:
            written["block_bytes"] = block_bytes(layer, row.storage).with_numbers(**numbers)
        if plan.tp * plan.cp > 1:
            numbers |= {"rank": row.sent.rank}
            sent = sent_formulas(layer, layout)
            written |= {
                f"sent_{name}": sent[name].with_numbers(**numbers)
                for name in ("prefill", "training", "decode")
                if name in sent
            }
        found.append((layer, indices, written))
    return found


def _devices(keys: Sequence[str], dtype: str) -> dict[str, Device]:
    if not keys:
        keys = (THIS,) if is_measured() else ()
    found = {key: device_of(key) for key in keys}
    for device in found.values():
        roofline_seconds(0, 0, device, dtype)  # raises if the dtype has no rate
    return found


def _selected(found: Sequence[Choice], keys: Sequence[str]) -> list[Choice]:
    known = {choice.key: choice for choice in found}
    unknown = [key for key in keys if key not in known]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: this model's attentions are {', '.join(known)}")
    return [choice for choice in found if not keys or choice.key in keys]


def _row(plan: Plan, choice: Choice, storage: Storage) -> Row:
    model = ModelShape(
        name=plan.model.name,
        architecture=plan.model.architecture,
        layers=choice.layers,
        hidden_size=plan.model.hidden_size,
        dtype=plan.dtype,
    )
    call: dict[str, Any] = {
        name: getattr(plan, name) for name in ("context", "batch", "dtype", "tp", "cp")
    }
    costs = [
        cost_of(layer, storage, **call) * len(same) for layer, same in model.distinct().items()
    ]
    sent = sent_of(choice.layers, **call)
    contexts, batches = _largest(plan, model, storage)
    return Row(
        key=choice.key,
        attention=choice.name,
        storage=storage,
        layers=choice.layers,
        cost=total_of(costs),
        block_bytes=(
            _taken(_in_blocks(plan, model, storage), "context", plan.context)
            if plan.block
            else None
        ),
        sent=sent,
        transfers=_transfers(plan, sent),
        prefill=_durations(plan, costs, "prefill"),
        decode=_durations(plan, costs, "decode"),
        largest_context=contexts,
        largest_batch=batches,
    )


def _durations(plan: Plan, costs: Sequence[Cost], phase: str) -> tuple[Duration, ...]:
    found = []
    for key, device in plan.devices.items():
        spent = {"memory": 0.0, "compute": 0.0}
        for cost in costs:
            flops, moved = getattr(cost, TIMED[phase]), getattr(cost, f"{phase}_bytes")
            seconds, bound = roofline_seconds(flops, moved, device, plan.dtype)
            spent[bound] += seconds
        found.append(Duration(key, sum(spent.values()), max(spent, key=lambda b: spent[b])))
    return tuple(found)


def _transfers(plan: Plan, sent: Sent) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(
            key,
            prefill=link_seconds(sent.prefill, sent.prefill_steps, link),
            training=link_seconds(sent.training, sent.training_steps, link),
            decode=link_seconds(sent.decode, sent.decode_steps, link),
        )
        for key, link in plan.links.items()
    )


def _largest(plan: Plan, model: ModelShape, storage: Storage) -> tuple[Largest, Largest]:
    """The largest context at the plan's batch, and the largest batch at its context."""
    alike = model.distinct()
    figures: list[Parts | None] = [
        [
            (len(indices), formulas(layer, storage)[name], _numbers(plan, layer, storage))
            for layer, indices in alike.items()
        ]
        for name in ("cache_bytes", "allocated_bytes")
    ]
    figures.append(_in_blocks(plan, model, storage) if plan.block else None)
    contexts, batches = [], []
    for parts in figures:
        of_context = partial(_taken, parts or (), "context")
        of_batch = partial(_taken, parts or (), "batch")
        contexts.append(None if parts is None else largest(of_context, plan.memory))
        batches.append(None if parts is None else largest(of_batch, plan.memory, MOST["batch"]))
    return Largest(*contexts), Largest(*batches)


def _in_blocks(plan: Plan, model: ModelShape, storage: Storage) -> Parts:
    """For each different layer: how many there are, the formula of its blocks, and its numbers."""
    return [
        (len(indices), block_bytes(layer, storage), _numbers(plan, layer, storage))
        for layer, indices in model.distinct().items()
    ]


def _taken(parts: Parts, name: str, value: int) -> int:
    """The bytes of all parts, with one of their sizes replaced."""
    return sum(
        count * int(formula.evaluate(**(numbers | {name: value})))
        for count, formula, numbers in parts
    )


def _numbers(plan: Plan, layer: LayerShape, storage: Storage) -> dict[str, Number]:
    return sizes(
        layer,
        storage,
        context=plan.context,
        batch=plan.batch,
        dtype=plan.dtype,
        tp=plan.tp,
        cp=plan.cp,
        block=plan.block or 1,
    )
