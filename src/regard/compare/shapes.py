"""The sizes of the layers and caches that ran, from which `regard.plan` computes their costs."""

from collections import Counter
from collections.abc import Sequence

from regard.cache import Cache, KVCache, SlidingCache
from regard.cache.quantized import QuantizedCache
from regard.plan.cost import Workload, cache_bytes
from regard.plan.modules import shape_of
from regard.plan.shapes import STORAGES, LayerShape, Storage

__all__ = ["bytes_of_caches", "shape_of", "storage_of"]


def storage_of(caches: Sequence[Cache], windows: Sequence[int | None] = ()) -> Storage | None:
    """How caches store keys and values; None if `regard.plan` has no formula for it.

    Args:
        caches: of a model, one for each layer.
        windows: of the layers; none of them has one if there are none.

    Examples:
        >>> from regard import QuantizedCache
        >>> from regard.compare.shapes import storage_of
        >>> storage_of([QuantizedCache(bits=4, group=32)])
        Storage(name='int4', key_bits=4, value_bits=4, group=32, page_size=0)
    """
    from regard.cache.quantized import QuantizedWindow

    found = set()
    for cache, window in zip(caches, windows or [None] * len(caches), strict=True):
        plain, codes = (
            KVCache if window is None else SlidingCache,
            (QuantizedCache if window is None else QuantizedWindow),
        )
        if type(cache) is plain:
            found.add(STORAGES["plain"])
        elif type(cache) is codes:
            stored = cache.format
            found.add(Storage(stored.name, stored.key_bits, stored.value_bits, stored.group))
        else:
            return None
    return found.pop() if len(found) == 1 else None


def bytes_of_caches(
    layers: Sequence[LayerShape], storage: Storage, *, context: int, dtype: str
) -> int:
    """Bytes in the caches of all layers, as `regard.plan` counts them.

    Args:
        layers: of a model.
        storage: of their caches.
        context: tokens.
        dtype: of numbers that are not codes.

    Examples:
        >>> from regard import GroupedQueryAttention
        >>> from regard.compare.shapes import bytes_of_caches, shape_of
        >>> from regard.plan import STORAGES
        >>> layers = [shape_of(GroupedQueryAttention(64, num_heads=8, num_kv_heads=2))] * 3
        >>> bytes_of_caches(layers, STORAGES["plain"], context=10, dtype="float16")
        1920
    """
    work = Workload(context=context, dtype=dtype)
    counts = Counter(layers).items()
    return sum(cache_bytes(layer, storage, work) * count for layer, count in counts)
