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
    """The storage of caches; None if `regard.plan` has no formula for it.

    Args:
        caches: of a model, one for each layer.
        windows: of the layers; none of them has one if there are none.
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
    """
    work = Workload(context=context, dtype=dtype)
    counts = Counter(layers).items()
    return sum(cache_bytes(layer, storage, work) * count for layer, count in counts)
