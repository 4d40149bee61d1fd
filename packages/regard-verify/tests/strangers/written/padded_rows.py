"""Attention of a set, or of a set to another: padded rows are neither read nor written."""

import torch
from torch import einsum, nn


class Attention(nn.Module):
    def __init__(self, dim, heads=4, dim_head=16):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(dim, 2 * heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim)

    def forward(self, x, context=None, mask=None, context_mask=None):
        batch, length, heads = *x.shape[:2], self.heads
        x = self.norm(x)
        other = x if context is None else context
        keys_seen = mask if context is None else context_mask
        q, k, v = (self.to_q(x), *self.to_kv(other).chunk(2, dim=-1))
        q, k, v = (
            t.reshape(batch, -1, heads, t.shape[-1] // heads).transpose(1, 2) for t in (q, k, v)
        )
        sim = einsum("b h i d, b h j d -> b h i j", q * self.scale, k)
        if keys_seen is not None:
            sim = sim.masked_fill(~keys_seen[:, None, None, :], -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        out = einsum("b h i j, b h j d -> b h i d", attn, v)
        out = self.to_out(out.transpose(1, 2).reshape(batch, length, -1))
        if mask is not None:
            out = out.masked_fill(~mask[..., None], 0.0)
        return out
