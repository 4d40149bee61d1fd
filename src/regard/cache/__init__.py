"""Caches of keys and values of earlier tokens. `Cache` is their protocol.

Examples:
    >>> import torch
    >>> from regard.cache import NO_CACHE
    >>> k = torch.zeros(1, 2, 5, 8)
    >>> (part,) = NO_CACHE.update(k, k)  # the neutral cache: the new tokens alone
    >>> part.kv_stop, part.streams[0] is k, NO_CACHE.length
    (5, True, 0)
"""

from regard.cache.fixed import StaticCache
from regard.cache.growing import KVCache
from regard.cache.protocol import NO_CACHE, Cache, NoCache
from regard.cache.quantized import QuantizedCache
from regard.cache.sliding import SlidingCache
from regard.cache.streams import Part

__all__ = [
    "NO_CACHE",
    "Cache",
    "KVCache",
    "NoCache",
    "Part",
    "QuantizedCache",
    "SlidingCache",
    "StaticCache",
]
