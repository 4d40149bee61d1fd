"""Caches of every kind with random tokens, for `pages.py`, and a decoding step over each."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import LAST_LEVEL_CACHE, Cold
from torch import Tensor

from regard import Cache, Causal, KVCache, PagedCache, PagePool, QuantizedCache, prepare

PAGE = 64  # tokens
Run = Callable[[], Any]
SDPA, DYNAMIC, STATIC = "torch sdpa", "transformers, dynamic", "transformers, static"


class Sizes(NamedTuple):
    """Of a layer, and of its caches."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    keys: int = 16384
    prefix: int = 8192
    rows: int = 16
    layers: int = 4
    rounds: int = 15
    cold: int = 4 * LAST_LEVEL_CACHE

    @property
    def streams(self) -> tuple[int, int]:
        """Heads and channels of the keys, and of the values."""
        return self.kv_heads, self.head_dim

    def nbytes(self, keys: int, batch: int, bits: float) -> int:
        """Of keys and values."""
        return round(2 * batch * keys * self.kv_heads * self.head_dim * bits / 8)


TINY = Sizes(4, 2, 16, keys=256, prefix=128, rows=3, layers=2, rounds=1, cold=1 << 16)


class Stored(NamedTuple):
    """How a contestant stores keys and values."""

    bits: float
    format: str = "plain"
    paged: bool = True
    scattered: bool = False
    dtype: torch.dtype = torch.float32


CODES = 0.5  # bits of a channel for its scale and its zero
CACHES = {
    "contiguous": Stored(32, paged=False),
    "pages in order": Stored(32),
    "pages scattered": Stored(32, scattered=True),
    "contiguous, bfloat16": Stored(16, paged=False, dtype=torch.bfloat16),
    "pages in order, bfloat16": Stored(16, dtype=torch.bfloat16),
    "pages scattered, bfloat16": Stored(16, scattered=True, dtype=torch.bfloat16),
    "K8V8, contiguous": Stored(8 + CODES, "K8V8", paged=False),
    "K8V8 pages": Stored(8 + CODES, "K8V8", scattered=True),
    "K8V4 pages": Stored(6 + CODES, "K8V4", scattered=True),
    "K4V4, contiguous": Stored(4 + CODES, "K4V4", paged=False),
    "K4V4 pages": Stored(4 + CODES, "K4V4", scattered=True),
    **{
        f"{format}{where}, bfloat16": Stored(
            bits + CODES, format, where == " pages", where == " pages", torch.bfloat16
        )
        for format, bits in (("K8V8", 8), ("K4V4", 4))
        for where in (", contiguous", " pages")
    },
}


def tokens(sizes: Sizes, batch: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    """Random keys and values."""
    heads, width = sizes.streams
    return [torch.randn(batch, heads, count, width).to(dtype) for _ in range(2)]


def new_cache(stored: Stored, pool: PagePool) -> Cache:
    if stored.paged:
        return PagedCache(pool)
    return KVCache() if stored.format == "plain" else QuantizedCache(format=stored.format)


def filled(sizes: Sizes, stored: Stored, batch: int, keys: int) -> Iterator[Cache]:
    """Caches that hold so many tokens, in copies; those that are scattered take pages in turn."""
    nbytes = sizes.nbytes(keys, batch, stored.bits)
    copies = max(2, -(-sizes.cold // nbytes))
    pool = PagePool(2 * copies * batch * (keys // PAGE + 2), PAGE, format=stored.format)
    caches = [new_cache(stored, pool) for _ in range(copies)]
    chunk = PAGE if stored.scattered else keys
    given = tokens(sizes, batch, chunk, stored.dtype)
    for _ in range(keys // chunk):
        for cache in caches:
            cache.update(*given)
    if not stored.paged:  # growing is not part of the step
        for cache in caches:
            cache.update(*(each[:, :, :1] for each in given))
            cache.truncate(keys)
    return iter(caches)


def cold(sizes: Sizes, stored: Stored, batch: int, keys: int) -> Cold:
    caches = filled(sizes, stored, batch, keys)
    return Cold(lambda: next(caches), sizes.nbytes(keys, batch, stored.bits), sizes.cold)


def step(sizes: Sizes, caches: Callable[[], Cache], batch: int, dtype: torch.dtype) -> Run:
    """One more token of each row attends to a cache that it is appended to."""
    q = torch.randn(batch, sizes.heads, 1, sizes.head_dim).to(dtype)
    k, v = tokens(sizes, batch, 1, dtype)

    def run() -> Tensor:
        cache = caches()
        call = prepare(
            q,
            k,
            v,
            mask=Causal(),
            span=cache.span(1),
        )
        return call.run(q, cache.update(k, v))

    return run


def peers(sizes: Sizes, batch: int) -> dict[str, Run]:
    """torch's kernel on contiguous keys, and the caches of transformers with it."""
    from transformers import DynamicCache, LlamaConfig, StaticCache

    heads, width = sizes.streams
    keys, q = sizes.keys, torch.randn(batch, sizes.heads, 1, sizes.head_dim)
    new = tokens(sizes, batch, 1, torch.float32)
    config = LlamaConfig(
        hidden_size=sizes.heads * width,
        num_attention_heads=sizes.heads,
        num_key_value_heads=heads,
        num_hidden_layers=1,
    )

    def held() -> tuple[DynamicCache, StaticCache, Tensor, Tensor]:
        k, v = tokens(sizes, batch, keys, torch.float32)
        grows, static = DynamicCache(), StaticCache(config=config, max_cache_len=keys + 1)
        grows.update(k, v, 0)
        static.update(k, v, 0)
        return grows, static, k, v

    caches = Cold(held, 2 * sizes.nbytes(keys, batch, 32), sizes.cold)

    def sdpa(k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=sizes.heads != heads)

    def dynamic() -> Tensor:
        cache, _, k, v = caches()
        cache.layers[0].keys, cache.layers[0].values = k, v
        return sdpa(*cache.update(*new, 0))

    def static() -> Tensor:
        cache = caches()[1]
        cache.layers[0].cumulative_length.fill_(keys)
        return sdpa(*cache.update(*new, 0))

    return {SDPA: lambda: sdpa(*caches()[2:]), DYNAMIC: dynamic, STATIC: static}
