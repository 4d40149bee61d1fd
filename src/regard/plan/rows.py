"""A plan as values: what each attention of a model costs, with each way of storing its cache."""

from collections.abc import Mapping
from dataclasses import dataclass

from regard.plan.cost import Cost
from regard.plan.devices import Device, Link
from regard.plan.sent import Sent
from regard.plan.shapes import LayerShape, ModelShape, Storage


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


@dataclass(frozen=True)
class Transfer:
    """The least time that a link needs for the bytes that one rank sends.

    Args:
        link: its key in `regard.plan.devices.LINKS`.
        prefill: seconds of the prefill.
        training: seconds of a forward and a backward pass.
        decode: seconds of one more token.
    """

    link: str
    prefill: float
    training: float
    decode: float


@dataclass(frozen=True)
class Largest:
    """The largest context, or batch, whose cache fits the memory; found by search.

    Args:
        ideal: of the live tokens alone; None if no size is too large.
        allocated: as regard's cache object allocates.
        in_blocks: in whole blocks; None also of a plan without blocks.
    """

    ideal: int | None
    allocated: int | None
    in_blocks: int | None


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
        transfers: the least times of that on each link.
        largest_context: at the plan's batch.
        largest_batch: at the plan's context.

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
    transfers: tuple[Transfer, ...]
    largest_context: Largest
    largest_batch: Largest


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
        links: between ranks, whose times are estimated, by key.
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
    links: Mapping[str, Link]
    block: int
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]
