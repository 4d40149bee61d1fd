"""Local attention in blocks: each block of queries sees its own block and the one before."""

import torch
import torch.nn.functional as F
from torch import nn


class LocalAttention(nn.Module):
    def __init__(self, dim, heads, window_size, causal=True):
        super().__init__()
        self.heads, self.window_size, self.causal = heads, window_size, causal
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, n, d = x.shape
        w, h = self.window_size, self.heads
        pad = -n % w
        x = F.pad(x, (0, 0, 0, pad))
        blocks = (n + pad) // w
        q, k, v = self.to_qkv(x).view(b, blocks, w, 3, h, d // h).permute(3, 0, 4, 1, 2, 5)
        at = torch.arange(n + pad, device=x.device).view(blocks, w)
        before = torch.cat([at.new_full((1, w), -1), at[:-1]])

        def with_block_before(t):
            earlier = torch.cat([torch.zeros_like(t[:, :, :1]), t[:, :, :-1]], dim=2)
            return torch.cat([earlier, t], dim=3)

        k, v = with_block_before(k), with_block_before(v)
        keys = torch.cat([before, at], dim=-1)[:, None, :]
        hidden = (keys < 0) | (keys >= n)
        if self.causal:
            hidden = hidden | (keys > at[..., None])
        sim = torch.einsum("b h c i d, b h c j d -> b h c i j", q, k) * (d // h) ** -0.5
        sim = sim.masked_fill(hidden, -torch.finfo(sim.dtype).max)
        out = torch.einsum("b h c i j, b h c j d -> b h c i d", sim.softmax(dim=-1), v)
        out = out.permute(0, 2, 3, 1, 4).reshape(b, n + pad, d)
        return self.to_out(out[:, :n])
