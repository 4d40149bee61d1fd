"""Costs of attention from shapes alone: parameters, cache bytes, FLOPs and bytes moved.

Each cost is a function of a layer and a workload; `cost_of` computes all of them, of a layer or a
model. Of bytes moved are counted, each once: the parameters, the hidden states in and out, and the
cache as it is stored, read and written. What a kernel may leave in registers and caches of the
processor is not counted: queries, scores, keys computed from latents, outputs of the heads.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import reduce
from operator import add

from regard.plan.cache_bytes import (
    allocated_bytes,
    cache_bytes,
    coded_keys,
    coded_tokens,
    stored_bytes,
    token_bytes,
)
from regard.plan.flops import (
    Form,
    decode_flops,
    prefill_flops,
    visible_decode_flops,
    visible_keys,
    visible_prefill_flops,
)
from regard.plan.shapes import STORAGES, LayerShape, ModelShape, Storage, Workload
from regard.plan.weights import check_known, parameters


@dataclass(frozen=True)
class Cost:
    """The costs of a layer or of a model's layers, on one rank. Costs add up.

    Attributes:
        parameters: of the attention.
        cache_bytes: of the tokens that are needed.
        allocated_bytes: of the buffers of regard's caches, after the prefill and one token.
        prefill_flops: of the prefill, every query with every key.
        visible_prefill_flops: the same with visible keys only.
        decode_flops: of one more token, with the keys that its cache holds.
        visible_decode_flops: the same with visible keys only.
        prefill_bytes: read and written by the prefill.
        decode_bytes: read and written by one more token.
        uncounted: layers of linear attention, of which cache bytes alone are known: parameters,
            FLOPs and bytes moved are those of the other layers.

    Examples:
        >>> from regard.plan import STORAGES, LayerShape, cost_of
        >>> gqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
        >>> cost = cost_of(gqa, STORAGES["plain"], context=100)
        >>> cost.cache_bytes, (cost + cost).cache_bytes
        (12800, 25600)
    """

    parameters: int = 0
    cache_bytes: int = 0
    allocated_bytes: int = 0
    prefill_flops: int = 0
    visible_prefill_flops: int = 0
    decode_flops: int = 0
    visible_decode_flops: int = 0
    prefill_bytes: int = 0
    decode_bytes: int = 0
    uncounted: int = 0

    @property
    def prefill_intensity(self) -> float:
        """FLOPs with visible keys for each byte that a prefill moves."""
        return self.visible_prefill_flops / self.prefill_bytes if self.prefill_bytes else 0.0

    @property
    def decode_intensity(self) -> float:
        """FLOPs with visible keys for each byte that one more token moves."""
        return self.visible_decode_flops / self.decode_bytes if self.decode_bytes else 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def __mul__(self, layers: int) -> "Cost":
        return Cost(*(getattr(self, name) * layers for name in _NAMES))


_NAMES = tuple(each.name for each in fields(Cost))


def cost_of(
    shape: LayerShape | ModelShape,
    storage: Storage,
    *,
    context: int,
    batch: int = 1,
    dtype: str | None = None,
    tp: int = 1,
    cp: int = 1,
    prefill_form: Form = "expanded",
    decode_form: Form = "absorbed",
) -> Cost:
    """The costs of a layer, or of all layers of a model together, on one rank.

    Args:
        shape: of a layer or a model.
        storage: of the caches.
        context: tokens in the cache, or of the prefill.
        batch: rows.
        dtype: of cache, weights and hidden states; the model's own if None, float32 of a layer.
        tp: ranks of tensor parallelism.
        cp: ranks of context parallelism.
        prefill_form: of layers with latents, as for `prefill_flops`.
        decode_form: the same, as for `decode_flops`.

    Raises:
        ValueError: if a number is out of its range, or a layer's mask or storage is not known.

    Examples:
        >>> from regard.plan import STORAGES, LayerShape, ModelShape, cost_of
        >>> gqa = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8)
        >>> model = ModelShape(name="two", architecture="llama", layers=(gqa, gqa), hidden_size=64)
        >>> cost_of(model, STORAGES["int8"], context=1000).cache_bytes == 2 * 1000 * 2 * 2 * (8 + 4)
        True
    """
    if isinstance(shape, LayerShape):
        layers, chosen = {shape: 1}, dtype or "float32"
    else:
        layers = {layer: len(indices) for layer, indices in shape.distinct().items()}
        chosen = dtype or shape.dtype
    work = Workload(context=context, batch=batch, dtype=chosen, tp=tp, cp=cp)
    return total_of(
        _cost(layer, storage, work, prefill_form, decode_form) * count
        for layer, count in layers.items()
    )


def total_of(costs: Iterable[Cost]) -> Cost:
    """The sum of costs."""
    return reduce(add, costs, Cost())


def _cost(
    layer: LayerShape, storage: Storage, work: Workload, prefill_form: Form, decode_form: Form
) -> Cost:
    """The costs of one layer; of linear attention those of its cache."""
    caches = {
        "cache_bytes": cache_bytes(layer, storage, work),
        "allocated_bytes": allocated_bytes(layer, storage, work),
    }
    if layer.kind == "linear":
        return Cost(**caches, uncounted=1)
    if layer.kind == "LatentKV" and (storage.page_size or work.cp > 1):
        decode_form = "expanded"  # caches that attend by themselves take values of every head
    return Cost(
        **caches,
        parameters=parameters(layer, work),
        prefill_flops=prefill_flops(layer, work, prefill_form),
        visible_prefill_flops=visible_prefill_flops(layer, work, prefill_form),
        decode_flops=decode_flops(layer, work, decode_form),
        visible_decode_flops=visible_decode_flops(layer, work, decode_form),
        prefill_bytes=prefill_bytes(layer, storage, work),
        decode_bytes=decode_bytes(layer, storage, work),
    )


def prefill_bytes(layer: LayerShape, storage: Storage, work: Workload) -> int:
    """Bytes moved by the prefill of `context` tokens.

    Keys and values of all tokens are written once and read once, as the cache stores them, also
    where a window drops them later. A layer with `keys_of` only reads them. In pages they are read
    in the dtype's own bits.
    """
    check_known(layer)
    tokens = work.tokens
    read = work.context * token_bytes(layer, _of_open_pages(storage), work)
    written = stored_bytes(layer, storage, work, tokens, coded_tokens(storage, work, tokens))
    return _moved(layer, work, tokens, read=read, written=written)


def decode_bytes(layer: LayerShape, storage: Storage, work: Workload) -> int:
    """Bytes moved by one more token after `context` tokens.

    The visible keys and values are read, those of the new token too; the latter are also written.
    Sealing a page, once in `page_size` tokens, is left out.
    """
    check_known(layer)
    keys = visible_keys(layer, work)
    written = token_bytes(layer, _of_open_pages(storage), work)
    read = stored_bytes(layer, storage, work, keys, coded_keys(storage, work, keys))
    return _moved(layer, work, 1, read=read, written=written)


def _of_open_pages(storage: Storage) -> Storage:
    """The storage of tokens in open pages, or in a cache without pages."""
    return STORAGES["plain"] if storage.page_size else storage


def _moved(layer: LayerShape, work: Workload, tokens: int, *, read: int, written: int) -> int:
    """The sum of the bytes of parameters, of the tokens' hidden states, and of each row's cache."""
    cached = read if layer.keys_of is not None else read + written
    hidden = 2 * work.batch * tokens * layer.hidden_size * work.itemsize
    return parameters(layer, work) * work.itemsize + hidden + work.batch * cached
