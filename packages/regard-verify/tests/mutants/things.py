"""Caches, pages and rotations with one fault each."""

import copy
from functools import partial

import torch

from mutants import good
from mutants.good import (
    CodedCache,
    FixedCache,
    ListCache,
    WindowCache,
    rotated,
)
from mutants.table import Mutant


def of(base, kind, **like):
    """A maker of mutants of one class."""

    def mutant(name, *kills, after="", **changes):
        made = type("Mutant" + base.__name__, (base,), changes)
        return Mutant(name, lambda: made, {"kind": kind, **like}, kills, after)

    return mutant


cache = of(ListCache, "cache", cache_bytes=64.0)
fixed = of(FixedCache, "cache", capacity=16)
window = of(WindowCache, "cache", window=4)
coded = of(CodedCache, "cache")


def only_counts(self, length):
    self.cut_to = length


def keys_only(self, rows):
    self.k = self.k[rows]


def shared_update(self, k, v):
    """The first it is given, it keeps."""
    if self.k is None:
        self.k, self.v = k, v
        return k, v
    return ListCache.update(self, k, v)


def into_storage(self, k, v):
    if self.k is None:
        self.k, self.v = torch.zeros(2, *k.shape[:2], 64, k.shape[3])
        self.n = 0
    self.k[:, :, self.n : self.n + k.shape[2]], self.v[:, :, self.n : self.n + k.shape[2]] = k, v
    self.n += k.shape[2]
    return self.k[:, :, : self.n], self.v[:, :, : self.n]


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


class SharedCopy(FixedCache):
    """Buffers that a copy writes into too."""

    capacity = 64
    update = into_storage
    length = property(lambda self: getattr(self, "n", 0))

    def __deepcopy__(self, memo):
        return copy.copy(self)


def wraps(self, k, v):
    k, v = ListCache.update(self, k, v)
    self.k, self.v = k[:, :, -16:], v[:, :, -16:]
    return self.k, self.v


class CountsFirst(FixedCache):
    """Counts the tokens before it checks whether they fit."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    length = property(lambda self: self.seen)

    def update(self, k, v):
        self.seen += k.shape[2]
        if self.seen > 16:
            raise ValueError("full")
        return ListCache.update(self, k, v)


class WritesFirst(FixedCache):
    """Writes what fits, then raises."""

    def update(self, k, v):
        room = 16 - self.length
        if k.shape[2] > room:
            ListCache.update(self, k[:, :, :room], v[:, :, :room])
            raise ValueError("full")
        return ListCache.update(self, k, v)


def window_of_views(self, k, v):
    got = ListCache.update(self, k, v)
    self.seen += k.shape[2]
    self.k, self.v = (x[:, :, -4:] for x in got)
    return got


def window_of_three(self, k, v):
    got = ListCache.update(self, k, v)
    self.seen += k.shape[2]
    self.k, self.v = (x[:, :, -2:].clone() for x in got)
    return got


def frozen(self, x):
    if not hasattr(self, "step"):
        self.step = CodedCache.scale_of(self, x).amax()
    return self.step


def repeated(self, k, v):
    got = ListCache.update(self, k, v)
    self.more = [x.repeat(1, 4, 1, 1) for x in got]
    return got


CACHES = [
    cache(
        "truncation leaves one too many",
        "cache_state_machine",
        truncate=lambda self, n: ListCache.truncate(self, n + 1),
    ),
    cache(
        "truncation changes the count alone",
        "cache_state_machine",
        after="mlx-lm#1735",
        truncate=only_counts,
        length=property(lambda self: getattr(self, "cut_to", None) or ListCache.length.fget(self)),
    ),
    cache(
        "truncation of keys alone",
        "cache_state_machine",
        after="transformers#45510",
        truncate=lambda self, n: setattr(self, "k", self.k[:, :, :n]),
    ),
    cache("reorder of keys alone", "cache_state_machine", reorder=keys_only),
    cache(
        "reorder skipped",
        "cache_state_machine",
        reorder=lambda self, rows: None,
        after="transformers#46612",
    ),
    cache(
        "reorder backwards",
        "cache_state_machine",
        reorder=lambda self, rows: ListCache.reorder(self, rows.flip(0)),
    ),
    cache(
        "new tokens in front",
        "cache_state_machine",
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
        "cache_state_machine",
        update=lambda self, k, v: ListCache.update(self, k, k),
    ),
    cache(
        "returns only new tokens",
        "cache_state_machine",
        update=lambda self, k, v: (ListCache.update(self, k, v), (k, v))[1],
    ),
    cache(
        "counts one more after truncation",
        "cache_state_machine",
        truncate=lambda self, n: (ListCache.truncate(self, n), setattr(self, "off", 1))[0],
        length=property(lambda self: ListCache.length.fget(self) + getattr(self, "off", 0)),
    ),
    cache("holds the caller's tensor", "cache_no_alias", update=shared_update),
    cache("holds repeated heads", "cache_bytes", update=repeated),
    Mutant(
        "one cache for all instances of the cache",
        lambda: Everybody,
        {"kind": "cache"},
        ("cache_state_machine",),
    ),
    Mutant(
        "a copy shares its buffers", lambda: SharedCopy, {"kind": "cache"}, ("cache_state_machine",)
    ),
    fixed("wraps when full", "cache_bounds", update=wraps, after="nanochat#627"),
    Mutant(
        "counts, then refuses",
        lambda: CountsFirst,
        {"kind": "cache", "capacity": 16},
        ("cache_bounds",),
        "transformers#30312",
    ),
    Mutant(
        "writes, then refuses",
        lambda: WritesFirst,
        {"kind": "cache", "capacity": 16},
        ("cache_bounds",),
    ),
    window("window holds views", "cache_bounds", update=window_of_views),
    window(
        "window drops too much",
        "cache_state_machine",
        update=window_of_three,
        after="transformers#37574",
    ),
    coded(
        "scale fixed by the first tokens",
        "quant_drift",
        scale_of=frozen,
        after="TensorRT-LLM#16916",
    ),
    coded(
        "scale of the whole batch",
        "quant_drift",
        after="mlx-lm#1555",
        scale_of=lambda self, x: x.abs().amax() / 127 + 0 * x[..., :1],
    ),
    coded(
        "outliers clipped",
        "quant_drift",
        after="llama-cpp-turboquant#305",
        scale_of=lambda self, x: 0 * x[..., :1] + 6.0 / 127,
    ),
]


def paged(name, *kills, after="", **changes):
    def function(q, k_pool, v_pool, block_table, lengths):
        given = changes.get("given", lambda *a: a)(q, k_pool, v_pool, block_table, lengths)
        return good.paged(*given)

    return Mutant(name, lambda: function, {"kind": "paged"}, kills, after)


def unbounded(q, k, v, table, lengths):
    return q, k, v, table, lengths.clamp(max=k.shape[1] * table.shape[1])


PAGES = [
    paged(
        "length one too long",
        "paged_equals_dense",
        after="shark-ai#738",
        given=lambda q, k, v, t, n: (q, k, v, t, torch.where(n % 4 != 0, n + 1, n)),
    ),
    paged(
        "length one too short",
        "paged_equals_dense",
        given=lambda q, k, v, t, n: (q, k, v, t, (n - 1).clamp(min=1)),
    ),
    paged(
        "whole pages only",
        "paged_equals_dense",
        after="vllm#50283",
        given=lambda q, k, v, t, n: (q, k, v, t, -(-n // 4) * 4),
    ),
    paged(
        "pages in order of their number",
        "paged_equals_dense",
        given=lambda q, k, v, t, n: (q, k, v.roll(1, 1), t, n),
    ),
    paged(
        "first row's table for all",
        "paged_equals_dense",
        given=lambda q, k, v, t, n: (q, k, v, t[-1:].expand(t.shape), n),
    ),
    paged(
        "key heads tiled", "paged_equals_dense", given=lambda q, k, v, t, n: (q, k, v.flip(2), t, n)
    ),
    paged("table read past its end", "paged_bounds", given=unbounded, after="flash-attention#2709"),
]


def rope(name, *kills, after="", turn=None):
    return Mutant(name, lambda: turn, {"kind": "rope", "pairing": "halves"}, kills, after)


def in_pairs(x, positions):
    order = torch.cat([torch.arange(0, x.shape[-1], 2), torch.arange(1, x.shape[-1], 2)])
    out = torch.empty_like(x)
    out[..., order] = rotated(x[..., order], positions)
    return out


def cast_angles(x, positions):
    dim = x.shape[-1]
    inverse = 10_000.0 ** (-torch.arange(0, dim, 2).float() / dim)
    angles = (positions.float()[:, None] @ inverse[None]).float()
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def half_positions(x, positions):
    return rotated(x, positions.bfloat16().double())


ROPES = [
    rope("pairs for halves", "rope_layout", turn=in_pairs, after="TinyLlama#24"),
    rope(
        "table in bfloat16",
        "rope_layout",
        "rope_norm_and_long",
        turn=partial(rotated, table=torch.bfloat16),
        after="transformers#29285",
    ),
    rope(
        "positions in bfloat16",
        "rope_norm_and_long",
        turn=half_positions,
        after="transformers#25681",
    ),
    rope(
        "rotated in the other direction",
        "rope_layout",
        turn=lambda x, positions: rotated(x, -positions),
    ),
    rope("positions from 1", "rope_layout", turn=lambda x, positions: rotated(x, positions + 1)),
    rope(
        "positions wrap at 4096",
        "rope_norm_and_long",
        after="onnxruntime#27597",
        turn=lambda x, positions: (
            rotated(x, positions % 4096) if int(positions.max()) < 10**9 else x
        ),
    ),
    rope(
        "positions stop at the table's end",
        "rope_norm_and_long",
        after="Automodel#2377",
        turn=lambda x, positions: rotated(x, positions.clamp(max=2048)),
    ),
    rope(
        "lengths grow",
        "rope_norm_and_long",
        turn=lambda x, positions: 1.02 * rotated(x, positions),
        after="imp#880",
    ),
    rope(
        "absolute positions",
        "rope_layout",
        turn=lambda x, positions: rotated(x, positions) + 0.01 * positions[:, None].to(x.dtype),
    ),
    rope("angles under autocast", "rope_autocast", turn=cast_angles, after="diffusers#13920"),
]

MUTANTS = [*CACHES, *PAGES, *ROPES]
