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
from regard.cache.paging.contexts import Context, context_of, fingerprint
from regard.cache.paging.formats import PageFormat, format_of
from regard.cache.paging.memory import PoolBytes
from regard.cache.paging.offloading import Offload
from regard.cache.paging.paged import PagedCache
from regard.cache.paging.pool import PagePool, Prefix
from regard.cache.parts import Part
from regard.cache.protocol import NO_CACHE, Cache, NoCache
from regard.cache.quantized import QuantizedCache
from regard.cache.sliding import SlidingCache
from regard.cache.stored import load_all, save_all, truncate_all

__all__ = [
    "NO_CACHE",
    "Cache",
    "Context",
    "KVCache",
    "NoCache",
    "Offload",
    "PageFormat",
    "PagePool",
    "PagedCache",
    "Part",
    "PoolBytes",
    "Prefix",
    "QuantizedCache",
    "SlidingCache",
    "StaticCache",
    "context_of",
    "fingerprint",
    "format_of",
    "load_all",
    "save_all",
    "truncate_all",
]
