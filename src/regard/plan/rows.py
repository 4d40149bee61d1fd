"""A plan as values: what each attention of a model costs, with each way of storing its cache."""

from collections.abc import Mapping
from dataclasses import dataclass

from regard.page.readable import readable_bytes, three_digits
from regard.plan.cost import Cost
from regard.plan.devices import Device
from regard.plan.sent import Sent
from regard.plan.shapes import LayerShape, ModelShape, Storage

UNITS = (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40))


@dataclass(frozen=True)
class Duration:
    """The least time that a device needs for some work.

    Args:
        device: its key in `regard.plan.devices.DEVICES`, or `"this"`.
        seconds: summed over layers, of each the larger of two times: its operations at the
            device's rate, its bytes at the device's bandwidth.
        bound: `"memory"` or `"compute"`: which of the two most of the time is.
    """

    device: str
    seconds: float
    bound: str


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
        unit, scale = _unit(min(row.cost.cache_bytes for row in self.rows))
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


def _unit(size: int) -> tuple[str, int]:
    """The largest unit of which there is at least one."""
    return next((unit for unit in reversed(UNITS) if size >= unit[1]), UNITS[0])


def _each(row: Row, scale: int) -> list[str]:
    """The cells of one storage."""
    sizes = (row.cost.cache_bytes, row.cost.allocated_bytes, row.block_bytes)
    shown = [three_digits(size / scale) for size in sizes if size is not None]
    weights = three_digits(row.cost.parameters / 1e6)
    return [row.attention, row.storage.name, weights, *shown, *_measures(row)]


def _measures(row: Row) -> list[str]:
    return [row.fitting, *(three_digits(1e3 * each.seconds) for each in row.decode)]
