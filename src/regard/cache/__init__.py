"""Caches of keys and values of earlier tokens. `regard.cache.protocol` has the protocol."""

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
