"""Layers from x [B, L, 7] to x that project in every way, and attention by plain numpy.

A layer has 3 heads of 5 channels. `core` is its attention, of q, k and v [B, H, L, D].
"""

import math

import numpy as np
import torch
from torch import nn

from regard_verify.law import Trial
from regard_verify.subject.conventions import Conventions
from regard_verify.subject.modules import ModuleCall, inputs_of

WIDTH, HEADS, DIM = 7, 3, 5
INNER = HEADS * DIM


def definition(q, k, v, *, scale=None, causal=False):
    """Attention of q [B, H, L, D] to k [B, G, S, D], v [B, G, S, Dv], one cell after the other."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for b, h, i in np.ndindex(*q.shape[:3]):
        g = h * k.shape[1] // q.shape[1]
        seen = range(i + 1 if causal else k.shape[2])
        powers = [math.exp(scale * float(q[b, h, i] @ k[b, g, j])) for j in seen]
        out[b, h, i] = sum(p * v[b, g, j] for p, j in zip(powers, seen, strict=True)) / sum(powers)
    return out


def right(q, k, v, scale=None):
    """The attention of the layers, where they have no fault."""
    many = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(many, 1), v.repeat_interleave(many, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.softmax(q @ k.mT * scale, -1) @ v


def by_head(x, heads=HEADS):
    """[B, L, H * D] to [B, H, L, D]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def call_of(module, *, layout="BLE", width=WIDTH):
    """The module as the suite calls it."""
    order, context = inputs_of(module)
    own = Conventions(width=width)
    return ModuleCall(module.eval(), own, layout=layout, order=order, context=context)


def trial():
    """Random numbers, the same for each test."""
    return Trial("projecting")


class Layer(nn.Module):
    """Three projections; its subclasses have others."""

    made = {"to_q": INNER, "to_k": INNER, "to_v": INNER}  # noqa: RUF012

    def __init__(self, core=right):
        super().__init__()
        self.core = core
        for name, size in self.made.items():
            setattr(self, name, nn.Linear(WIDTH, size))
        self.out = nn.Linear(INNER, WIDTH)

    def heads(self, x):
        return (by_head(w(x)) for w in (self.to_q, self.to_k, self.to_v))

    def forward(self, x):
        return self.out(self.core(*self.heads(x)).transpose(1, 2).flatten(2))


class Fused(Layer):
    """One projection for all three, its axes in any order."""

    made = {"qkv": 3 * INNER}  # noqa: RUF012

    def __init__(self, axes, core=right):
        super().__init__(core)
        self.axes = axes

    def heads(self, x):
        sizes = {"part": 3, "head": HEADS, "dim": DIM}
        cut = self.qkv(x).unflatten(-1, [sizes[axis] for axis in self.axes])
        place = [2 + self.axes.index(axis) for axis in ("part", "head", "dim")]
        return cut.permute(place[0], 0, place[1], 1, place[2])


class Pair(Layer):
    """Queries by themselves, keys and values together."""

    made = {"to_q": INNER, "to_kv": 2 * INNER}  # noqa: RUF012

    def heads(self, x):
        k, v = self.to_kv(x).chunk(2, -1)
        return by_head(self.to_q(x)), by_head(k), by_head(v)


class LowRank(Layer):
    """Queries through 4 channels and a norm."""

    made = {"down": 4, "to_kv": 2 * INNER}  # noqa: RUF012

    def __init__(self, core=right):
        super().__init__(core)
        self.norm, self.up = nn.LayerNorm(4), nn.Linear(4, INNER)

    def heads(self, x):
        k, v = self.to_kv(x).chunk(2, -1)
        return by_head(self.up(self.norm(self.down(x)))), by_head(k), by_head(v)


class Grouped(Layer):
    """Fewer key heads than query heads."""

    def __init__(self, groups, core=right):
        self.made = {"to_q": 6 * DIM, "to_k": groups * DIM, "to_v": groups * DIM}
        super().__init__(core)
        self.groups, self.out = groups, nn.Linear(6 * DIM, WIDTH)

    def heads(self, x):
        groups = self.groups
        return (
            by_head(self.to_q(x), 6),
            by_head(self.to_k(x), groups),
            by_head(self.to_v(x), groups),
        )


class Latent(Layer):
    """Latent attention: keys and values from one latent, and 2 channels that all heads share."""

    made = {"down": 4 + 2, "to_q": HEADS * (DIM + 2)}  # noqa: RUF012

    def __init__(self, core=right):
        super().__init__(core)
        self.norm, self.up = nn.LayerNorm(4), nn.Linear(4, 2 * INNER)

    def heads(self, x):
        latent, shared = self.down(x).split([4, 2], -1)
        k, v = by_head(self.up(self.norm(latent))).chunk(2, -1)
        shared = by_head(shared, 1).expand(-1, HEADS, -1, -1)
        return by_head(self.to_q(x)), torch.cat([k, shared], -1), v


class PerHead(nn.Module):
    """A module for each head."""

    class One(nn.Module):
        def __init__(self, core):
            super().__init__()
            self.core = core
            self.q, self.k, self.v = (nn.Linear(WIDTH, DIM) for _ in range(3))

        def forward(self, x):
            return self.core(*(w(x)[:, None] for w in (self.q, self.k, self.v)))[:, 0]

    def __init__(self, core=right):
        super().__init__()
        self.each = nn.ModuleList(self.One(core) for _ in range(HEADS))
        self.out = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.out(torch.cat([head(x) for head in self.each], -1))


class Gated(Layer):
    """The merged heads are multiplied by a function of x."""

    made = {**Layer.made, "gate": INNER}  # noqa: RUF012

    def __init__(self, opening, core=right):
        super().__init__(core)
        self.opening = opening

    def forward(self, x):
        merged = self.core(*self.heads(x)).transpose(1, 2).flatten(2)
        return self.out(merged * self.opening(self.gate(x)))


class Normed(Layer):
    """Norms of queries and keys, and a norm before all of it."""

    def __init__(self, core=right):
        super().__init__(core)
        self.pre, self.q_norm, self.k_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(DIM), nn.RMSNorm(DIM)

    def heads(self, x):
        q, k, v = super().heads(self.pre(x))
        return self.q_norm(q), self.k_norm(k), v


class BatchSecond(Layer):
    """x is [L, B, E], and projected as one list of tokens [L * B, E]."""

    def heads(self, x):
        length, batch = x.shape[:2]
        flat = x.flatten(0, 1)
        return (
            w(flat).view(length, batch, HEADS, DIM).permute(1, 2, 0, 3)
            for w in (self.to_q, self.to_k, self.to_v)
        )

    def forward(self, x):
        merged = self.core(*self.heads(x)).permute(2, 0, 1, 3).reshape(-1, INNER)
        return self.out(merged).view(x.shape)


class Cross(Layer):
    """It attends to another sequence."""

    def forward(self, x, context=None):
        context = x if context is None else context
        q, k, v = by_head(self.to_q(x)), by_head(self.to_k(context)), by_head(self.to_v(context))
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


class Einsum(nn.Module):
    """Weights [H, E, D], heads before tokens, no module for any of it."""

    def __init__(self, core=right):
        super().__init__()
        self.core = core
        self.w = nn.Parameter(torch.randn(3, HEADS, WIDTH, DIM))
        self.o = nn.Parameter(torch.randn(HEADS, DIM, WIDTH))

    def forward(self, x):
        q, k, v = (torch.einsum("ble,hed->bhld", x, w) for w in self.w)
        return torch.einsum("bhld,hde->ble", self.core(q, k, v), self.o)
