"""Right for a plain call, and wrong under another caller or after an error: one fault each.

Whole functions and modules, as people write them; no steps are exchanged.
"""

import ctypes
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mutants.table import Mutant

PLAIN = {"mask": "", "pairing": "none"}
MASKED = {"mask": "mask", "polarity": "keep", "mask_shape": "BHLS", "mask_dtype": "bool"}
CACHED = {"causal": True, "window": 0, "cache": "cache", "cache_style": "object"}


def sdpa(q, k, v, mask=None):
    """Plain attention, bool mask, True = attend. No GQA tricks: repeat the KV heads."""
    n_rep = q.size(1) // k.size(1)
    k = k.repeat_interleave(n_rep, dim=1)
    v = v.repeat_interleave(n_rep, dim=1)
    att = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if mask is not None:
        att = att.masked_fill(mask.logical_not(), torch.finfo(att.dtype).min)
    return torch.matmul(F.softmax(att, dim=-1), v)


# --- default dtype


def out_buffer(q, k, v):
    B, H, T, _ = q.shape
    out = torch.empty(B, H, T, v.shape[-1])
    for b in range(B):
        out[b] = sdpa(q[b : b + 1], k[b : b + 1], v[b : b + 1])[0]
    return out


def online_softmax(q, k, v, block=2):
    """FlashAttention's recurrence with its running sums allocated without a dtype."""
    n_rep = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(n_rep, 1), v.repeat_interleave(n_rep, 1)
    m = torch.full(q.shape[:-1], float("-inf"), dtype=q.dtype)
    denom = torch.zeros(*q.shape[:-1])
    acc = torch.zeros(*q.shape[:-1], v.shape[-1])
    for start in range(0, k.size(2), block):
        kb, vb = k[:, :, start : start + block], v[:, :, start : start + block]
        s = q @ kb.transpose(-2, -1) * q.size(-1) ** -0.5
        new_m = torch.maximum(m, s.amax(-1))
        p = torch.exp(s - new_m.unsqueeze(-1))
        rescale = torch.exp(m - new_m)
        denom = (denom * rescale + p.sum(-1)).to(denom.dtype)
        acc = (acc * rescale.unsqueeze(-1) + (p @ vb)).to(acc.dtype)
        m = new_m
    return (acc / denom.unsqueeze(-1)).to(q.dtype)


def copies_bytes(q, k, v):
    """Four bytes per value, in memory of any dtype."""
    result = sdpa(q.float(), k.float(), v.float()).contiguous()
    out = torch.empty(result.shape)
    ctypes.memmove(out.data_ptr(), result.data_ptr(), 4 * result.numel())
    return out.to(q.dtype)


class RoPEOnTheFly(nn.Module):
    def __init__(self, dim=32, num_heads=4):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def rotate(self, x):
        t, d = x.shape[-2], x.shape[-1]
        freqs = 10000 ** -(torch.arange(0, d, 2) / d)
        angle = torch.outer(torch.arange(t).to(freqs.dtype), freqs)
        angle = torch.cat([angle, angle], dim=-1)
        x1, x2 = x.chunk(2, dim=-1)
        return (x * angle.cos() + torch.cat([-x2, x1], dim=-1) * angle.sin()).to(x.dtype)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (
            p(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        causal = torch.ones(t, t, dtype=torch.bool).tril()
        y = sdpa(self.rotate(q), self.rotate(k), v, causal)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


# --- forward mode


# --- autocast


def upcast_only(q, k, v, softcap=0.0):
    """`.float()` is no shield: autocast casts the operands of a matmul back."""
    n_rep = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(n_rep, dim=1).float() for x in (k, v))
    att = (q.float() @ k.mT) * q.size(-1) ** -0.5
    if softcap:
        att = softcap * torch.tanh(att / softcap)
    return (att.softmax(-1) @ v).to(q.dtype)


def hurried(q, k, v):
    """Under autocast the weights are cut to a byte and a half."""
    n_rep = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(n_rep, dim=1) for x in (k, v))
    fast = torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", enabled=False):
        att = (q.float() @ k.float().mT) * q.size(-1) ** -0.5
        p = att.softmax(-1)
        p = torch.round(p * 16) / 16 if fast else p
        return (p @ v.float()).to(q.dtype)


def zeros_where_blind(q, k, v, mask=None):
    out = sdpa(q, k, v, mask)
    if mask is None:
        return out
    return torch.where(mask.any(-1, keepdim=True), out, torch.zeros(1, dtype=torch.float32))


def single_query(q, k, v):
    """One query needs no matmul."""
    if q.size(2) != 1:
        return sdpa(q, k, v)
    n_rep = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(n_rep, dim=1) for x in (k, v))
    w = ((q * k).sum(-1) * q.size(-1) ** -0.5).softmax(-1)
    return (w.unsqueeze(-1) * v).sum(2, keepdim=True)


# --- in-place changes between the passes


class Block(nn.Module):
    """Causal attention whose cache is an object: `cache.k`, `cache.v`, or None."""

    def __init__(self, dim=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))

    def heads(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def remember(self, cache, k, v):
        return (k, v) if cache is None else cache.update(k, v)

    def attend(self, q, k, v, seen):
        return sdpa(q, k, v, seen)

    def forward(self, x, cache=None):
        q, k, v = (self.heads(p(x)) for p in (self.to_q, self.to_k, self.to_v))
        k, v = self.remember(cache, k, v)
        t, s = q.size(2), k.size(2)
        seen = torch.ones(t, s, dtype=torch.bool).tril(s - t)
        return self.to_out(self.attend(q, k, v, seen).transpose(1, 2).flatten(2))


# --- one cache for two layers


class Owned:
    """The first layer that writes owns it; a call without a layer's name is accepted."""

    def __init__(self):
        self.k, self.v, self.owner = None, None, None

    def update(self, k, v, owner=None):
        if self.owner is not None and owner is not self.owner:
            raise RuntimeError("this cache belongs to another layer: use one cache per layer")
        k = k if self.k is None else torch.cat([self.k, k], dim=2)
        v = v if self.v is None else torch.cat([self.v, v], dim=2)
        self.owner, self.k, self.v = owner, k, v
        return k, v


class OwnedBlock(Block):
    """Right: the cache gets the writing layer, and is restored if the rest fails."""

    def forward(self, x, cache=None):
        before = None if cache is None else dict(vars(cache))
        try:
            return super().forward(x, cache)
        except Exception:
            if cache is not None:
                vars(cache).update(before)
            raise

    def remember(self, cache, k, v):
        return (k, v) if cache is None else cache.update(k, v, owner=self)


class Indexed(OwnedBlock):
    """Right: layers share one cache by their index."""

    layer_idx = 0

    def remember(self, cache, k, v):
        return (k, v) if cache is None else cache.update(k, v, self.layer_idx)


class ByIndex:
    """Right: a list for each layer, as a model's cache has it."""

    def __init__(self):
        self.layers = {}

    def update(self, k, v, layer_idx):
        if layer_idx in self.layers:
            old_k, old_v = self.layers[layer_idx]
            k, v = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
        self.layers = {**self.layers, layer_idx: (k, v)}
        return k, v


class IndexForgotten(ByIndex):
    def update(self, k, v, layer_idx):
        return super().update(k, v, 0)


class Ownerless(Owned):
    def update(self, k, v, owner=None):
        return super().update(k, v)


class Global(Block):
    """The cache is in the class, and the same for all instances."""

    past: dict = {}  # noqa: RUF012

    def reset_cache(self):
        self.past.clear()

    def forward(self, x, use_cache=False):
        return super().forward(x, self.past if use_cache else None)

    def remember(self, cache, k, v):
        if cache is None:
            return k, v
        if "k" in cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        cache.update(k=k, v=v)
        return k, v


# --- steps that fail


class CountsAhead(Block):
    """Learned positions; the count moves before anything can go wrong."""

    def __init__(self):
        super().__init__()
        self.wpe = nn.Embedding(64, 32)
        self.reset_cache()

    def reset_cache(self):
        self.k = self.v = None
        self.pos = 0

    def forward(self, x, use_cache=False):
        start = self.pos if use_cache else 0
        if use_cache:
            self.pos += x.size(1)
        x = x + self.wpe(torch.arange(start, start + x.size(1)))
        return super().forward(x, self if use_cache else None)

    def remember(self, cache, k, v):
        if cache is None:
            return k, v
        if self.k is not None:
            k, v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        self.k, self.v = k, v
        return k, v


class MaskLooksLate(OwnedBlock):
    """The mask is looked at when the cache has grown already."""

    def forward(self, x, mask=None, cache=None):
        q, k, v = (self.heads(p(x)) for p in (self.to_q, self.to_k, self.to_v))
        k, v = self.remember(cache, k, v)
        if mask is not None and mask.shape[-2:] != (q.size(2), k.size(2)):
            raise ValueError(f"mask is {tuple(mask.shape)} for {q.size(2)} x {k.size(2)} tokens")
        seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2))
        seen = seen if mask is None else seen & mask
        return self.to_out(self.attend(q, k, v, seen).transpose(1, 2).flatten(2))


# --- right


def tensor_scale(q, k, v, mask=None):
    """A scale that is a tensor of the default dtype; products in the dtype of the inputs."""
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    att = torch.einsum("bhqd,bhkd->bhqk", q, k) / torch.sqrt(torch.tensor(q.size(-1)))
    if mask is not None:
        att = torch.where(mask, att, torch.tensor(-1e30))
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(att, -1), v)


class TensorScale(Block):
    def attend(self, q, k, v, seen):
        return tensor_scale(q, k, v, seen)


class Checkpointed(Block):
    def attend(self, q, k, v, seen):
        return checkpoint(sdpa, q, k, v, seen, use_reentrant=True)


ALONE = {"causal": True, "window": 0, "cache": ""}  # without the caches in this file
RIGHT = {
    "a cache that knows its layer": (OwnedBlock, {**CACHED, "new_cache": "mutants.callers:Owned"}),
    "a cache by layers": (Indexed, {**CACHED, "new_cache": "mutants.callers:ByIndex"}),
    "a scale that is a tensor": (tensor_scale, PLAIN),
    "a layer with a scale that is a tensor": (TensorScale, ALONE),
    "a checkpointed layer": (Checkpointed, ALONE),
}


def function(name, made, *kills, like=PLAIN, after=""):
    return Mutant(name, lambda: made, like, kills, after)


def block(name, made, *kills, new_cache=None, after="", **like):
    own = {**CACHED, "new_cache": f"mutants.callers:{new_cache}"} if new_cache else like
    return Mutant(name, lambda: made, {"causal": True, "window": 0, **own, **like}, kills, after)


MUTANTS = [
    function("output allocated in the default dtype", out_buffer, "default_dtype"),
    function("running sums in the default dtype", online_softmax, "default_dtype"),
    function("four bytes per value are written", copies_bytes, "default_dtype"),
    block("a rotary table in the default dtype", RoPEOnTheFly, "default_dtype", pairing="halves"),
    function("float32 products that autocast casts back", upcast_only, "autocast_precision"),
    function("weights cut short under autocast", hurried, "autocast_precision"),
    function("float32 behind a mask", zeros_where_blind, "autocast_dtype", like=MASKED),
    function("float32 for a single query", single_query, "autocast_dtype"),
    block("one cache for all layers", Block, "one_past_two_layers", new_cache="Ownerless"),
    block("a layer index that is ignored", Indexed, "one_past_two_layers",
          new_cache="IndexForgotten"),
    block("a cache of the class", Global, "one_past_two_layers", cache_style="internal",
          cache=None),
    block("tokens counted before they are projected", CountsAhead, "refused_step"),
    block("a mask refused after the cache has grown", MaskLooksLate, "refused_step",
          new_cache="Owned"),
]  # fmt: skip
