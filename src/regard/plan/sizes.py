"""The names of sizes in formulas of cost, and their numbers for a layer, a storage and a call.

With `tp` ranks of tensor parallelism a rank has its share of the key heads, rounded up, and the
query heads that these serve; `replicas` ranks that have the same key head share its query heads,
rounded up (`regard.distributed.tensor_parallel`). A latent is on every rank. With `cp` ranks of
context parallelism it has its share of the tokens, rounded up. Where these ranks differ, the size
`rank` is the one that is counted: the last, which sends most under a causal mask.
"""

from dataclasses import fields
from functools import cache

from regard.plan.formula import Formula, Number, ceil_div, minimum, size
from regard.plan.shapes import DTYPE_BYTES, LayerShape, Storage

HIDDEN, HEAD, VALUE = size("hidden_size"), size("head_dim"), size("v_head_dim")
LATENT, QUERY_LATENT = size("kv_lora_rank"), size("q_lora_rank")
ROTARY = size("qk_rope_head_dim")
KEY_HEADS = ceil_div(size("num_kv_heads"), size("tp"))  # of a rank
GROUP = ceil_div(size("num_heads"), size("num_kv_heads"))  # query heads that a key head serves
QUERY_HEADS = KEY_HEADS * ceil_div(GROUP, size("replicas"))  # of a rank
BATCH, CONTEXT, ITEMSIZE = size("batch"), size("context"), size("itemsize")
WINDOW, CHUNK, BLOCK = size("window"), size("chunk"), size("block")
TOKENS = ceil_div(CONTEXT, size("cp"))  # of a rank

LAYER_SIZES = tuple(
    each.name
    for each in fields(LayerShape)
    if each.type in (int, int | None) and each.name != "keys_of"
)


def within_window(layer: LayerShape, tokens: Formula) -> Formula:
    """The tokens, or those of a window if that is less."""
    return tokens if layer.window is None else minimum(tokens, WINDOW)


@cache
def replicas(num_kv_heads: int, tp: int) -> int:
    """Ranks that have the same key heads: as many as let every key head have ranks of its own.

    Args:
        num_kv_heads: of the layer on one device.
        tp: ranks that the heads are divided among, into sets of equal size.

    Examples:
        >>> from regard.plan.sizes import replicas
        >>> [replicas(2, tp) for tp in (1, 2, 4, 6, 7)]
        [1, 1, 2, 3, 1]
    """
    most = max(1, tp // num_kv_heads)
    return next(n for n in range(most, 0, -1) if tp % n == 0)


def sizes(
    layer: LayerShape,
    storage: Storage,
    *,
    context: int,
    batch: int = 1,
    dtype: str = "float32",
    tp: int = 1,
    cp: int = 1,
    capacity: int | None = None,
    block: int = 1,
) -> dict[str, Number]:
    """The numbers for every name in the formulas of a layer's costs.

    Args:
        layer: its sizes.
        storage: of its cache.
        context: tokens in the cache, or of the prefill.
        batch: rows.
        dtype: of the cache, the weights and the hidden states; a key of `DTYPE_BYTES`.
        tp: ranks of tensor parallelism.
        cp: ranks of context parallelism.
        capacity: tokens of a cache of a fixed size; the context and one more if None.
        block: tokens of a block, of which an engine reserves whole ones.

    Raises:
        ValueError: if a number is not a whole one in its range, or the dtype is not known.

    Examples:
        >>> from regard.plan.shapes import STORAGES, LayerShape
        >>> from regard.plan.sizes import sizes
        >>> gqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
        >>> found = sizes(gqa, STORAGES["int8"], context=100, dtype="bfloat16")
        >>> found["num_kv_heads"], found["context"], found["itemsize"], found["key_bits"]
        (2, 100, 2, 8)
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    capacity = context + 1 if capacity is None else capacity
    for name, value, least in (
        ("context", context, 0),
        ("batch", batch, 1),
        ("tp", tp, 1),
        ("cp", cp, 1),
        ("capacity", capacity, 1),
        ("block", block, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is a whole number, at least {least}, got {value!r}")
    itemsize = DTYPE_BYTES[dtype]
    found = {name: getattr(layer, name) for name in LAYER_SIZES}
    return {
        **{name: value for name, value in found.items() if value is not None},
        "context": context,
        "batch": batch,
        "itemsize": itemsize,
        "key_bits": storage.key_bits or 8 * itemsize,
        "value_bits": storage.value_bits or 8 * itemsize,
        "group": storage.group,
        "page_size": storage.page_size,
        "tp": tp,
        "cp": cp,
        "rank": cp - 1,
        "replicas": replicas(layer.num_kv_heads, tp),
        "capacity": capacity,
        "block": block,
    }
