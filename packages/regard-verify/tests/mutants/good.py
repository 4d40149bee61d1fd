"""Attention that is right, in steps that can be exchanged one at a time.

A mutant is one of these with one step replaced: all other steps are right.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import nn

INF = float("inf")


def scale(q, k, v):
    return q.shape[-1] ** -0.5


def scores(q, k, factor):
    return q @ k.transpose(-1, -2) * factor


def expand(k, heads):
    return k.repeat_interleave(heads // k.shape[1], 1)


def causal(rows, columns):
    """Counted from the bottom right corner."""
    i = torch.arange(rows)[:, None] + columns - rows
    return torch.arange(columns)[None] <= i


def window(rows, columns, size):
    i = torch.arange(rows)[:, None] + columns - rows
    return torch.arange(columns)[None] > i - size


def visible(mask, rows, columns, is_causal, size):
    """A boolean for each cell, or None where all are visible."""
    keep = torch.ones(rows, columns, dtype=torch.bool)
    if is_causal:
        keep = keep & causal(rows, columns)
    if size is not None:
        keep = keep & window(rows, columns, size)
    if mask is not None and mask.dtype == torch.bool:
        keep = keep & mask
    return keep


def softmax(x, keep):
    x = x.masked_fill(~keep, -INF)
    top = x.amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    top = torch.where(top.isinf(), 0.0, top).detach()
    powers = torch.where(keep, torch.exp(torch.where(keep, x, top) - top), 0.0)
    total = powers.sum(-1, keepdim=True)
    return powers / torch.where(total == 0, 1.0, total)


def cap(x, softcap):
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def drop(weights, p):
    return F.dropout(weights, p)


def clean(x, keep):
    """Keys that are hidden from all queries may hold anything."""
    seen = keep.any(-2)
    seen = seen.reshape(*(1,) * (3 - seen.ndim), *seen.shape)  # [.., H, S]
    if seen.shape[1] not in (1, x.shape[1]):
        seen = seen.any(1, keepdim=True)
    return torch.where(
        seen[..., None].expand(*x.shape[:2], -1, 1), x, torch.zeros((), dtype=x.dtype)
    )


def refuse(q, k, v, mask):
    if k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1] or q.shape[0] != k.shape[0]:
        raise ValueError("shapes do not fit")
    if q.shape[1] % k.shape[1]:
        raise ValueError("heads do not divide")
    if mask is not None and not (mask.dtype == torch.bool or mask.dtype == q.dtype):
        raise ValueError("a mask is bool, or of the queries' type")


def before(q, k, v, mask):
    """A step that does nothing, for mutants that do something first."""
    return q, k, v, mask


def after(out, q, k, v):
    return out


@dataclass(frozen=True)
class Steps:
    """The steps of a function."""

    refuse: Callable = refuse
    before: Callable = before
    expand: Callable = expand
    expand_values: Callable = expand
    scale: Callable = scale
    scores: Callable = scores
    cap: Callable = cap
    visible: Callable = visible
    clean: Callable = clean
    softmax: Callable = softmax
    drop: Callable = drop
    weights: Callable = lambda weights, keep: weights
    output: Callable = torch.matmul
    after: Callable = after

    def function(self):
        """The function of these steps."""

        def attention(
            q,
            k,
            v,
            mask=None,
            is_causal=False,
            window=None,
            scale=None,
            softcap=None,
            bias=None,
            dropout_p=0.0,
            need_weights=False,
        ):
            return self.run(
                q, k, v, mask, is_causal, window, scale, softcap, bias, dropout_p, need_weights
            )

        return attention

    def run(self, q, k, v, mask, is_causal, size, factor, softcap, bias, p, need_weights):
        self.refuse(q, k, v, mask)
        q, k, v, mask = self.before(q, k, v, mask)
        with torch.autocast("cpu", enabled=False):  # products are in the dtype written here
            out, w = self.attend(q, k, v, mask, is_causal, size, factor, softcap, bias, p)
        out = self.after(out, q, k, v)
        return (out, w) if need_weights else out

    def attend(self, q, k, v, mask, is_causal, size, factor, softcap, bias, p):
        heads, rows, columns = q.shape[1], q.shape[2], k.shape[2]
        if k.shape[1] > heads:
            raise ValueError("more key heads than query heads")
        dtype = q.dtype
        keys, values = self.expand(k, heads), self.expand_values(v, heads)
        if torch.float64 not in (q.dtype, keys.dtype, values.dtype):
            q, keys, values = q.float(), keys.float(), values.float()
        keep = self.visible(mask, rows, columns, is_causal, size)
        keys, values = self.clean(keys, keep), self.clean(values, keep)
        s = self.scores(q, keys, self.scale(q, k, v) if factor is None else factor)
        s = self.cap(s, softcap)
        s = s if bias is None else s + bias
        if mask is not None and mask.dtype != torch.bool:
            keep = keep & (mask > -1e4)
            s = s + torch.where(mask > -1e4, mask, 0.0)
        w = self.weights(self.softmax(s, keep), keep)
        w = self.drop(w, p) if p else w
        return self.output(w, values).to(dtype), w


LIKE = {
    "layout": "BHLD",
    "mask": "mask",
    "polarity": "keep",
    "mask_shape": "BHLS",
    "mask_dtype": "bool",
    "causal": False,
    "window": 0,
    "alignment": "bottom-right",
    "pairing": "none",
    "fully_masked": "zeros",
}


def rotated(x, positions, theta=10_000.0, table=torch.float32):
    """RoPE in halves: x [B, H, L, D]."""
    dim = x.shape[-1]
    with torch.autocast("cpu", enabled=False):
        angles = positions[:, None].double() * theta ** (-torch.arange(0, dim, 2).double() / dim)
        cos, sin = angles.cos().to(table).to(x.dtype), angles.sin().to(table).to(x.dtype)
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def split(x, heads):
    return x.unflatten(-1, (heads, x.shape[-1] // heads)).transpose(1, 2)


def merge(x):
    return x.transpose(1, 2).flatten(-2)


def rotate(q, k, v, past):
    """Queries follow the cached tokens; keys are those of the new tokens only."""
    positions = torch.arange(past, past + q.shape[2])
    return rotated(q, positions), rotated(k, positions), v


def append(past, k, v):
    """The cache is (k, v), or None."""
    if past is None:
        return k, v
    return torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)


@dataclass(frozen=True)
class LayerSteps:
    """The steps of a layer."""

    split: Callable = split
    merge: Callable = merge
    rotate: Callable = rotate
    append: Callable = append
    length: Callable = lambda past: 0 if past is None else past[0].shape[2]
    window: int | None = None
    drop: Callable = lambda layer, x: F.dropout(x, layer.dropout, layer.training)
    before: Callable = lambda layer, x: x
    after: Callable = lambda layer, x, out: out
    keep: Callable = lambda mask, past: mask
    steps: Steps = field(default_factory=Steps)

    def causal(self, call):
        return True


class Layer(nn.Module):
    """Causal GQA with RoPE, dropout on its output and a cache that is returned."""

    def __init__(self, how=LayerSteps(), p=0.0, bias=True):
        super().__init__()
        self.how, self.dropout = how, p
        self.num_heads, self.num_kv_heads, self.head_dim = 4, 2, 8
        self.q_proj = nn.Linear(32, 32, bias=bias)
        self.k_proj = nn.Linear(32, 16, bias=bias)
        self.v_proj = nn.Linear(32, 16, bias=bias)
        self.o_proj = nn.Linear(32, 32, bias=bias)

    def forward(self, x, mask=None, past_kv=None, use_cache=False):
        how = self.how
        x = how.before(self, x)
        q = how.split(self.q_proj(x), 4)
        k, v = how.split(self.k_proj(x), 2), how.split(self.v_proj(x), 2)
        q, k, v = how.rotate(q, k, v, how.length(past_kv))
        k, v = past = how.append(past_kv, k, v)
        out = how.steps.run(
            q,
            k,
            v,
            how.keep(mask, past_kv),
            how.causal(self),
            how.window,
            None,
            None,
            None,
            0.0,
            False,
        )
        out = how.after(self, x, self.o_proj(how.merge(how.drop(self, out))))
        return (out, past) if use_cache else out


LAYER_LIKE = {
    "layout": "BLE",
    "mask": "mask",
    "polarity": "keep",
    "mask_shape": "BHLS",
    "mask_dtype": "bool",
    "causal": True,
    "window": 0,
    "pairing": "halves",
    "heads": 4,
    "kv_heads": 2,
    "fully_masked": "zeros",
    "cache": "past_kv",
    "cache_style": "tuple",
}


class ListCache:
    """A cache that grows, cuts back and reorders."""

    def __init__(self):
        self.k = self.v = None

    @property
    def length(self):
        return 0 if self.k is None else self.k.shape[2]

    def update(self, k, v):
        k, v = k.clone(), v.clone()
        self.k = k if self.k is None else torch.cat([self.k, k], 2)
        self.v = v if self.v is None else torch.cat([self.v, v], 2)
        return self.k, self.v

    def truncate(self, length):
        self.k, self.v = self.k[:, :, :length].clone(), self.v[:, :, :length].clone()

    def reorder(self, rows):
        self.k, self.v = self.k[rows], self.v[rows]


class WindowCache(ListCache):
    """The newest 4 tokens."""

    size = 4

    def __init__(self):
        super().__init__()
        self.seen = 0

    @property
    def length(self):
        return self.seen

    def update(self, k, v):
        got = super().update(k, v)
        self.seen += k.shape[2]
        self.k, self.v = (x[:, :, -self.size :].clone() for x in got)
        return got

    truncate = None
    reorder = None


WindowCache.truncate = WindowCache.reorder = property(
    lambda self: (_ for _ in ()).throw(AttributeError())
)


def paged(q, k_pool, v_pool, block_table, lengths):
    """q [B, H, D] against pages."""
    size, out = k_pool.shape[1], []
    for row in range(q.shape[0]):
        length = int(lengths[row])
        if length > size * block_table.shape[1]:
            raise ValueError("longer than its table")
        pages = block_table[row, : -(-length // size)]
        k, v = (x[pages].flatten(0, 1)[:length].movedim(0, 1)[None] for x in (k_pool, v_pool))
        out.append(Steps().function()(q[row][None, :, None], k, v)[0, :, 0])
    return torch.stack(out)


class MLA(nn.Module):
    """Multi-head latent attention, expanded or absorbed; its cache is the normed latent and the
    rotated key, [B, 1, L, 16] and [B, 1, L, 4]."""

    heads, nope, rope, rank = 4, 8, 4, 12

    def __init__(self):
        super().__init__()
        self.num_heads = self.heads
        self.q = nn.Linear(32, self.heads * (self.nope + self.rope), bias=False)
        self.down = nn.Linear(32, self.rank + self.rope, bias=False)
        self.norm = nn.RMSNorm(self.rank)
        nn.init.uniform_(self.norm.weight, 0.5, 2.0)
        self.up = nn.Linear(self.rank, self.heads * 2 * self.nope, bias=False)
        self.out = nn.Linear(self.heads * self.nope, 32, bias=False)

    def held(self, x):
        """What is cached of new tokens: the latent, and the key before rotation."""
        c, k = self.down(x).split([self.rank, self.rope], -1)
        return self.norm(c)[:, None], k[:, None]

    def forward(self, x, past_kv=None, use_cache=False, absorb=False):
        past = 0 if past_kv is None else past_kv[0].shape[2]
        q = split(self.q(x), self.heads)
        q, q_rope = q.split([self.nope, self.rope], -1)
        c, k_rope = self.held(x)
        k_rope = rotated(k_rope, torch.arange(past, past + x.shape[1]))
        q_rope = rotated(q_rope, torch.arange(past, past + x.shape[1]))
        c, k_rope = append(past_kv, c, k_rope)
        attend = self.absorbed if absorb else self.expanded
        out = self.out(merge(attend(q, q_rope, c, k_rope)))
        return (out, (c, k_rope)) if use_cache else out

    def expanded(self, q, q_rope, c, k_rope):
        kv = split(self.up(c[:, 0]), self.heads)
        k, v = kv.split([self.nope, self.nope], -1)
        keys = torch.cat([k, k_rope.expand(-1, self.heads, -1, -1)], -1)
        return self.attend(torch.cat([q, q_rope], -1), keys, v, (self.nope + self.rope) ** -0.5)

    def matrices(self):
        return self.up.weight.unflatten(0, (self.heads, 2 * self.nope)).split(self.nope, 1)

    def absorbed(self, q, q_rope, c, k_rope):
        up_k, up_v = self.matrices()
        wide = torch.cat([torch.einsum("bhld,hdr->bhlr", q, up_k), q_rope], -1)
        keys = torch.cat([c, k_rope], -1)
        read = self.attend(wide, keys, c, self.absorbed_scale(wide))
        return torch.einsum("bhlr,hdr->bhld", read, up_v)

    def absorbed_scale(self, wide):
        return (self.nope + self.rope) ** -0.5

    def attend(self, q, k, v, factor):
        return Steps().run(q, k, v, None, True, None, factor, None, None, 0.0, False)


MLA_LIKE = {
    "width": 32,
    "layout": "BLE",
    "causal": True,
    "window": 0,
    "cache": "past_kv",
    "cache_style": "tuple",
    "cache_bytes": (12 + 4) * 4.0,
}


class Cross(nn.Module):
    """Reads another sequence, or itself."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))

    def source(self, x, context):
        return x if context is None else context

    def forward(self, x, context=None):
        given = self.source(x, context)
        q, k, v = (
            split(w(y), 4)
            for w, y in ((self.q_proj, x), (self.k_proj, given), (self.v_proj, given))
        )
        return self.o_proj(merge(Steps().function()(q, k, v)))


def with_steps(**changes):
    """A function with these steps changed."""
    return replace(Steps(), **changes).function()
