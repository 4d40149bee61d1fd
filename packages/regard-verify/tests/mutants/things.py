"""Caches, pages and rotations with one fault each, in the layer or function that uses them."""

from functools import partial

import torch
from torch import nn

from mutants import good
from mutants.good import ListCache, WindowCache, rotated
from mutants.table import Mutant


class Serving(nn.Module):
    """Causal attention with RoPE, whose positions are those that its cache counts."""

    window = None

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x, cache=None):
        past = 0 if cache is None else cache.length
        if cache is not None and vars(cache).setdefault("owner", self) is not self:
            raise ValueError("this is the cache of another layer")
        q, k, v = (good.split(part, 4) for part in self.qkv(x).chunk(3, -1))
        q, k, v = good.rotate(q, k, v, past)
        k, v = (k, v) if cache is None else cache.update(k, v)
        steps = good.Steps()
        return self.out(good.merge(steps.run(
            q, k, v, None, True, self.window, None, None, None, 0.0, False
        )))  # fmt: skip


class ServingWindow(Serving):
    """The same with a window of 4 tokens."""

    window = 4


SERVING = {"pairing": "halves", "cache": "cache", "cache_style": "object", "causal": True}
WHOLE = {**SERVING, "window": 0, "cache_bytes": 256.0}


def cache(name, *kills, after="", base=ListCache, layer=Serving, like=WHOLE, **changes):
    """A layer whose cache is `base` with changes."""
    made = type("Mutant" + base.__name__, (base,), changes)
    return Mutant(name, lambda: layer, {**like, "new_cache": made}, kills, after)


def only_counts(self, length):
    self.cut_to = length


class Everybody(ListCache):
    """Holds what all hold."""

    held = {}  # noqa: RUF012

    def __init__(self):
        pass

    k = property(lambda self: self.held.get("k"), lambda self, x: self.held.__setitem__("k", x))
    v = property(lambda self: self.held.get("v"), lambda self, x: self.held.__setitem__("v", x))

    def update(self, k, v):
        if self.k is not None and self.k.shape[0] != k.shape[0]:
            self.held.clear()
        return super().update(k, v)


def window_of_three(self, k, v):
    got = ListCache.update(self, k, v)
    self.seen += k.shape[2]
    self.k, self.v = (x[:, :, -2:].clone() for x in got)
    return got


def repeated(self, k, v):
    got = ListCache.update(self, k, v)
    self.more = [x.repeat(1, 4, 1, 1) for x in got]
    return got


CACHES = [
    cache(
        "truncation leaves one too many",
        "drafts_dropped",
        truncate=lambda self, n: ListCache.truncate(self, n + 1),
    ),
    cache(
        "truncation changes the count alone",
        "drafts_dropped",
        after="mlx-lm#1735",
        truncate=only_counts,
        length=property(lambda self: getattr(self, "cut_to", None) or ListCache.length.fget(self)),
    ),
    cache(
        "truncation of keys alone",
        "drafts_dropped",
        after="transformers#45510",
        truncate=lambda self, n: setattr(self, "k", self.k[:, :, :n]),
    ),
    cache(
        "new tokens in front",
        "chunked_prefill",
        update=lambda self, k, v: (
            ListCache.update(self, k, v)
            if self.k is None
            else (
                setattr(self, "k", torch.cat([k, self.k], 2)),
                setattr(self, "v", torch.cat([v, self.v], 2)),
                (self.k, self.v),
            )[2]
        ),
    ),
    cache(
        "values are keys",
        "decode_equals_full",
        update=lambda self, k, v: ListCache.update(self, k, k),
    ),
    cache(
        "returns only new tokens",
        "decode_equals_full",
        update=lambda self, k, v: (ListCache.update(self, k, v), (k, v))[1],
    ),
    cache(
        "counts one more after truncation",
        "drafts_dropped",
        truncate=lambda self, n: (ListCache.truncate(self, n), setattr(self, "off", 1))[0],
        length=property(lambda self: ListCache.length.fget(self) + getattr(self, "off", 0)),
    ),
    cache("holds repeated heads", "cache_bytes", update=repeated),
    cache("one cache for all instances of the cache", "decode_equals_full", base=Everybody),
    cache(
        "window drops too much",
        "decode_equals_full",
        base=WindowCache,
        layer=ServingWindow,
        like={**SERVING, "window": 4},
        update=window_of_three,
        after="transformers#37574",
    ),
]


def paged(name, *kills, after="", **changes):
    def function(q, k_pool, v_pool, block_table, lengths):
        given = changes.get("given", lambda *a: a)(q, k_pool, v_pool, block_table, lengths)
        return good.paged(*given)

    return Mutant(name, lambda: function, {"kind": "paged"}, kills, after)


PAGES = [
    paged(
        "length one too long",
        "oracle_forward",
        after="shark-ai#738",
        given=lambda q, k, v, t, n: (q, k, v, t, torch.where(n % 4 != 0, n + 1, n)),
    ),
    paged(
        "length one too short",
        "oracle_forward",
        given=lambda q, k, v, t, n: (q, k, v, t, (n - 1).clamp(min=1)),
    ),
    paged(
        "whole pages only",
        "oracle_forward",
        after="vllm#50283",
        given=lambda q, k, v, t, n: (q, k, v, t, -(-n // 4) * 4),
    ),
    paged(
        "pages in order of their number",
        "oracle_forward",
        given=lambda q, k, v, t, n: (q, k, v.roll(1, 1), t, n),
    ),
    paged(
        "first row's table for all",
        "oracle_forward",
        given=lambda q, k, v, t, n: (q, k, v, t[-1:].expand(t.shape), n),
    ),
    paged("key heads tiled", "oracle_forward", given=lambda q, k, v, t, n: (q, k, v.flip(2), t, n)),
]


def rope(name, *, after="", turn):
    """Attention whose queries and keys are rotated by `turn`."""

    def attention(q, k, v):
        q, k = (turn(x, torch.arange(x.shape[2])) for x in (q, k))
        return good.Steps().function()(q, k, v)

    like = {"pairing": "halves", "causal": False, "window": 0}
    return Mutant(name, lambda: attention, like, ("oracle_forward",), after)


def in_pairs(x, positions):
    order = torch.cat([torch.arange(0, x.shape[-1], 2), torch.arange(1, x.shape[-1], 2)])
    out = torch.empty_like(x)
    out[..., order] = rotated(x[..., order], positions)
    return out


ROPES = [
    rope("pairs for halves", turn=in_pairs, after="TinyLlama#24"),
    rope(
        "table in bfloat16", turn=partial(rotated, table=torch.bfloat16), after="transformers#29285"
    ),
    rope("lengths grow", turn=lambda x, at: 1.02 * rotated(x, at), after="imp#880"),
    rope(
        "absolute positions",
        turn=lambda x, at: rotated(x, at) + 0.01 * at[:, None].to(x.dtype),
    ),
]

MUTANTS = [*CACHES, *PAGES, *ROPES]
