"""Caches of every kind with streams of every sort, and what can be read of them."""

import torch

from regard import KVCache, QuantizedCache, SlidingCache, StaticCache

KINDS = {
    "growing": KVCache,
    "static": lambda: StaticCache(13),
    "sliding": lambda: SlidingCache(4, 1),
    "window of one": lambda: SlidingCache(1),
    "8 bits": lambda: QuantizedCache(8, 4),
    "4 bits": lambda: QuantizedCache(4, 6),
    "keys and values of other bits": lambda: QuantizedCache(format="K6V4", group=4),
}
STREAMS = {
    "keys and values": lambda n: (torch.randn(2, 3, n, 6), torch.randn(2, 3, n, 5)),
    "latent": lambda n: (torch.randn(3, 1, n, 7, dtype=torch.bfloat16),),
    "latent and positions": lambda n: (
        torch.randn(2, 1, n, 7, dtype=torch.float64),
        torch.arange(n, dtype=torch.int32).expand(2, 1, n).unsqueeze(-1),
    ),
    "no rows": lambda n: (torch.randn(0, 2, n, 4), torch.randn(0, 2, n, 4)),
}


def content(cache):
    """All that can be read of a cache: what the next token would attend to."""
    new = tuple(torch.ones(*e.shape[:2], 1, e.shape[3], dtype=e.dtype) for e in cache.empty_streams)
    with torch.no_grad():
        (part,) = cache.peek(*new)
    return (cache.length, cache.nbytes, cache.span(1).kv_start, *(x.clone() for x in part.streams))


def same(mine, theirs):
    pairs = zip(mine, theirs, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def filled(kind, streams, tokens=(3, 1, 2)):
    cache = KINDS[kind]()
    for n in tokens:
        cache.update(*STREAMS[streams](n))
    return cache
