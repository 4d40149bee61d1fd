"""The sizes of the layers and caches that ran, from which `regard.plan` computes their costs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from regard.cache import Cache, KVCache, PagedCache, SlidingCache
from regard.cache.quantized import QuantizedCache, QuantizedWindow
from regard.plan.cache_bytes import cache_bytes
from regard.plan.modules import shape_of as shape_of
from regard.plan.shapes import STORAGES, LayerShape, Storage, Workload, storages_of


def storage_of(caches: Sequence[Cache], windows: Sequence[int | None] = ()) -> Storage | None:
    """The storage of a model's caches, one for each layer, of which none has a window if there are
    no `windows`; None if `regard.plan` has no formula for it."""
    found = set()
    for cache, window in zip(caches, windows or [None] * len(caches), strict=True):
        known = (KVCache, QuantizedCache) if window is None else (SlidingCache, QuantizedWindow)
        if type(cache) not in (*known, PagedCache):
            return None
        found.add(storage_in(cache))
    return found.pop() if len(found) == 1 else None


def storage_in(cache: Any) -> Storage:
    """The storage of the tokens that a cache holds, plain or in codes of its format."""
    if isinstance(cache, PagedCache):
        return storages_of([cache.memory.format.name], cache.memory.page_size)[0]
    stored = getattr(cache, "format", None)
    if stored is None:
        return STORAGES["plain"]
    return Storage(stored.name, stored.key_bits, stored.value_bits, stored.group)


def bytes_of_caches(
    layers: Sequence[LayerShape], storage: Storage, *, context: int, dtype: str
) -> int:
    """Bytes in the caches of all layers of a model, as `regard.plan` counts them; `dtype` is that
    of numbers that are not codes."""
    work = Workload(context=context, dtype=dtype)
    return sum(cache_bytes(layer, storage, work) * n for layer, n in Counter(layers).items())
