"""Every attention that a model could have, with what it costs and the context that fits."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from regard.page.readable import readable_bytes, three_digits
from regard.plan.cache_bytes import block_bytes, cache_bytes
from regard.plan.candidates import SHARES, Choice, choices
from regard.plan.cost import Cost, cost_of, total_of
from regard.plan.devices import THIS, Device, device_of, is_measured, roofline_seconds
from regard.plan.sent import Sent, sent_of
from regard.plan.shapes import (
    MOST,
    LayerShape,
    ModelShape,
    Storage,
    Workload,
    check_whole,
    storages_of,
)
from regard.words import one_of

GIBIBYTE = 1 << 30
TIMED = {"prefill": "visible_prefill_flops", "decode": "visible_decode_flops"}
ALSO = {f"mla-{share}": f"deepseek-{share}" for share in SHARES}  # other names that are taken
MEANT = {"mla": "deepseek-50", "latent": "latent-50"}  # names that may be meant for these
UNITS = (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40))


@dataclass(frozen=True)
class Duration:
    """The least time that a device needs for some work."""

    device: str  # its key in `regard.plan.devices.DEVICES`, or `"this"`
    # summed over layers, of each the larger of two times: its operations at the device's rate, its
    # bytes at the device's bandwidth
    seconds: float
    bound: str  # `"memory"` or `"compute"`: which of the two most of the time is


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attention with one way of storing its cache. Bytes and work are those of one rank.

    Args:
        key: of the attention, as `"gqa-4"`.
        attention: as readers know it, as `"GQA-4"`.
        storage: how its cache stores numbers.
        layers: of the model with that attention, in order.
        cost: of all layers together: parameters, cache bytes (ideal, and as regard's cache object
            allocates), FLOPs and bytes of the prefill and of one more token.
        block_bytes: of the cache in whole blocks of the plan's `block`; None without blocks.
        prefill: least times of the prefill of `context` tokens, on each device.
        decode: the same of one more token for each row of the batch.
        sent: what the rank sends to others; zeros on one rank.
        largest_context: tokens whose cache, of the tokens that are needed, fits the memory; None
            if that of any number does.

    Examples:
        >>> from regard.plan import LayerShape, ModelShape, plan
        >>> layer = LayerShape(
        ...     hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=8, v_head_dim=8)
        >>> model = ModelShape(name="m", architecture="llama", layers=(layer,), hidden_size=64)
        >>> row = plan(model, context=100, devices=["h100"], block=16).rows[0]
        >>> row.key, row.storage.name, row.cost.cache_bytes, row.block_bytes
        ('shipped', 'plain', 25600, 28672)
    """

    key: str
    attention: str
    storage: Storage
    layers: tuple[LayerShape, ...]
    cost: Cost
    block_bytes: int | None
    prefill: tuple[Duration, ...]
    decode: tuple[Duration, ...]
    sent: Sent
    largest_context: int | None

    @property
    def fitting(self) -> str:
        """The tokens that fit the memory, in words."""
        return "any" if self.largest_context is None else f"{self.largest_context:,}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model's attentions side by side, for one context, batch and memory.

    Args:
        model: whose layers were given.
        context: tokens of a prefill, and in the cache of a decode step.
        batch: rows.
        memory: bytes, of each rank, for the cache alone.
        dtype: of weights, activations and plain caches.
        tp: ranks that the heads are divided among.
        cp: ranks that the tokens are divided among.
        devices: whose times are estimated, by key.
        block: tokens of a block, of which an engine reserves whole ones; 0 for no blocks.
        rows: each attention with each storage.
        left_out: attentions that cannot be rows, each with the reason; none if rows were chosen.

    Examples:
        >>> from regard.plan import LayerShape, ModelShape, plan
        >>> layer = LayerShape(
        ...     hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=8, v_head_dim=8)
        >>> model = ModelShape(name="m", architecture="llama", layers=(layer,), hidden_size=64)
        >>> made = plan(model, context=100, devices=["h100"], attentions=["shipped", "mqa"])
        >>> [row.attention for row in made.rows[::5]]
        ['GQA-4, as shipped', 'MQA']
    """

    model: ModelShape
    context: int
    batch: int
    memory: int
    dtype: str
    tp: int
    cp: int
    devices: Mapping[str, Device]
    block: int
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]

    def table(self, every: bool = False) -> tuple[list[str], list[list[str]]]:
        """The headings, and the cells of a line for each attention.

        A line has the cache by storage; the context that fits and the times have the first storage.
        With `every`, a line for each storage has the bytes that are needed, those that regard
        allocates, and those of whole blocks.
        """
        least = min(row.cost.cache_bytes for row in self.rows)
        unit, scale = next((each for each in reversed(UNITS) if least >= each[1]), UNITS[0])
        several = len(self.devices) > 1
        times = (f"decode{several * f' on {key}'}, ms" for key in self.devices)
        measures = [f"tokens in {readable_bytes(self.memory)}", *times]
        if every:
            figures = ["ideal", "regard", *([f"blocks of {self.block:,}"] if self.block else [])]
            heads = ["attention", "cache", "weights, M", *(f"{each}, {unit}" for each in figures)]
            return heads + measures, [_each(row, scale) for row in self.rows]
        attentions: dict[str, list[Row]] = {}
        for row in self.rows:
            attentions.setdefault(row.key, []).append(row)
        storages = dict.fromkeys(row.storage.name for row in self.rows)
        heads = ["attention", *(f"{storage}, {unit}" for storage in storages)]
        cells = [
            [
                rows[0].attention,
                *(three_digits(row.cost.cache_bytes / scale) for row in rows),
                *_measures(rows[0]),
            ]
            for rows in attentions.values()
        ]
        return heads + measures, cells


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
    check_whole("memory", memory, 1)
    check_whole("context", context, 1, MOST["context"])
    check_whole("page_size", page_size, 0, MOST["page_size"])
    check_whole("block", block, 0, MOST["block"])
    work = Workload(context=context, batch=batch, dtype=dtype or model.dtype, tp=tp, cp=cp)
    if not any(layer.causal for layer in model.layers):
        raise ValueError(
            f"{model.name} is an encoder: it computes all tokens at once and has no cache to plan; "
            "regard describe lists its layers"
        )
    stored = storages_of(storages, page_size)
    found, missing = choices(replace(model, dtype=work.dtype))
    selected = _selected(found, attentions)
    settings = Plan(
        **vars(work),
        model=model,
        memory=memory,
        devices=_devices(devices, work.dtype),
        block=block,
        rows=(),
        left_out={} if attentions else missing,
    )
    rows = (_row(settings, work, choice, each) for choice in selected for each in stored)
    return replace(settings, rows=tuple(rows))


def largest(taken: Callable[[int], int], memory: int, most: int = MOST["context"]) -> int | None:
    """The largest whole number whose bytes, which never fall when it grows, fit the memory, by
    bisection; 0 if 1 does not fit, None if `most` fits.

    Examples:
        >>> from regard.plan.planning import largest
        >>> largest(lambda tokens: tokens * tokens, 50)
        7
    """
    fitting = bisect_right(range(1, most + 1), memory, key=taken)
    return None if fitting == most else fitting


def _devices(keys: Sequence[str], dtype: str) -> dict[str, Device]:
    if not keys:
        keys = (THIS,) if is_measured() else ()
    found = {key: device_of(key) for key in keys}
    for device in found.values():
        roofline_seconds(0, 0, device, dtype)  # raises if the dtype has no rate
    return found


def _selected(found: Sequence[Choice], keys: Sequence[str]) -> list[Choice]:
    known = [choice.key for choice in found]
    meant = {name: key for name, key in MEANT.items() if key in known}
    wanted = [one_of("attention", ALSO.get(key.lower(), key), known, meant) for key in keys]
    return [choice for choice in found if not keys or choice.key in wanted]


def _row(plan: Plan, work: Workload, choice: Choice, storage: Storage) -> Row:
    counts = Counter(choice.layers)
    costs = [cost_of(layer, storage, **vars(work)) * count for layer, count in counts.items()]

    def of_context(tokens: int) -> int:
        held = replace(work, context=tokens)
        return sum(cache_bytes(layer, storage, held) * n for layer, n in counts.items())

    blocks = [block_bytes(each, storage, work, plan.block) for each in choice.layers if plan.block]
    return Row(
        key=choice.key,
        attention=choice.name,
        storage=storage,
        layers=choice.layers,
        cost=total_of(costs),
        block_bytes=sum(blocks) if plan.block else None,
        sent=sent_of(choice.layers, **vars(work)),
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


def _each(row: Row, scale: int) -> list[str]:
    """The cells of one storage."""
    sizes = (row.cost.cache_bytes, row.cost.allocated_bytes, row.block_bytes)
    shown = [three_digits(size / scale) for size in sizes if size is not None]
    weights = three_digits(row.cost.parameters / 1e6)
    return [row.attention, row.storage.name, weights, *shown, *_measures(row)]


def _measures(row: Row) -> list[str]:
    return [row.fitting, *(three_digits(1e3 * each.seconds) for each in row.decode)]
