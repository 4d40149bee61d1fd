"""Caches: what a layer remembers of the tokens before. `regard.cache.protocol` says what one is."""

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
