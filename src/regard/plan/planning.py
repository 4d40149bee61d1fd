"""Every attention that a model could have, with what it costs and the context that fits."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from regard.plan.cache_bytes import block_bytes, cache_bytes
from regard.plan.candidates import Choice, choices
from regard.plan.cost import Cost, cost_of, total_of
from regard.plan.devices import THIS, Device, device_of, is_measured, roofline_seconds
from regard.plan.rows import Duration, Plan, Row
from regard.plan.sent import sent_of
from regard.plan.shapes import (
    DTYPE_BYTES,
    LayerShape,
    ModelShape,
    Storage,
    Workload,
    check_whole,
    storages_of,
)

GIBIBYTE = 1 << 30
MOST = {  # the largest numbers that are accepted: sums of bytes stay below 2**63 for real models
    "context": 10**12,
    "batch": 10**9,
    "tp": 10**6,
    "cp": 10**4,
    "memory": 10**18,
}
Bytes = Callable[[LayerShape, Storage, Workload], int]  # of one layer
TIMED = {"prefill": "visible_prefill_flops", "decode": "visible_decode_flops"}


def plan(
    model: ModelShape,
    *,
    context: int = 4096,
    batch: int = 1,
    memory: int = GIBIBYTE,
    devices: Sequence[str] = (),
    dtype: str | None = None,
    tp: int = 1,
    cp: int = 1,
    block: int = 0,
    attentions: Sequence[str] = (),
    storages: Sequence[str] = (),
    page_size: int = 0,
) -> Plan:
    """The costs of each attention that a model could have, with plain and with quantised caches.

    Args:
        model: from `describe`, or made of `LayerShape`s.
        context: tokens of a prefill, and in the cache of a decode step.
        batch: rows.
        memory: bytes, of each rank, for the cache alone.
        devices: keys of `DEVICES`, or `"this"`, which is this machine; if there are none,
            this machine if its rates are stored.
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
        >>> row.attention, row.cost.cache_bytes, row.largest_context
        ('GQA-4, as shipped', 25600, 200)
    """
    given = {"context": context, "batch": batch, "tp": tp, "cp": cp, "memory": memory}
    for name, value in (given | {"page_size": page_size, "block": block}).items():
        check_whole(name, value, int(name in given), MOST.get(name, 10**6))
    if page_size and block:
        raise ValueError(
            f"pages are blocks of their own: give page_size={page_size} or block={block}, not both"
        )
    if not any(layer.causal for layer in model.layers):
        raise ValueError(
            f"{model.name} is an encoder: it computes all tokens at once and has no cache to plan; "
            "regard describe lists its layers"
        )
    chosen = dtype or model.dtype
    if chosen not in DTYPE_BYTES:
        raise ValueError(f"dtype={chosen!r} is not one of {', '.join(DTYPE_BYTES)}")
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
    counts = Counter(choice.layers)
    call: dict[str, Any] = {
        name: getattr(plan, name) for name in ("context", "batch", "dtype", "tp", "cp")
    }
    costs = [cost_of(layer, storage, **call) * count for layer, count in counts.items()]
    work = Workload(**call)
    in_blocks = partial(block_bytes, block=plan.block) if plan.block else None

    def of_context(tokens: int) -> int:
        return _total(cache_bytes, counts, storage, replace(work, context=tokens))

    return Row(
        key=choice.key,
        attention=choice.name,
        storage=storage,
        layers=choice.layers,
        cost=total_of(costs),
        block_bytes=_total(in_blocks, counts, storage, work) if in_blocks else None,
        sent=sent_of(choice.layers, **call),
        prefill=_durations(plan, costs, "prefill"),
        decode=_durations(plan, costs, "decode"),
        largest_context=largest(of_context, plan.memory),
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


def _total(figure: Bytes, layers: Counter[LayerShape], storage: Storage, work: Workload) -> int:
    """The bytes of all layers."""
    return sum(figure(layer, storage, work) * count for layer, count in layers.items())
