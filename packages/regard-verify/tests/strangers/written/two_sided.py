"""Windowed attention of an encoder: each token sees `reach` tokens to both sides of it."""

import torch
import torch.nn.functional as F
from torch import nn


class WindowAttention(nn.Module):
    def __init__(self, dim, heads, reach=3):
        super().__init__()
        self.heads, self.reach = heads, reach
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, n, d = x.shape
        h, r = self.heads, self.reach
        q, k, v = self.to_qkv(x).view(b, n, 3, h, d // h).permute(2, 0, 3, 1, 4)
        k, v = (F.pad(t, (0, 0, r, r)).unfold(2, 2 * r + 1, 1) for t in (k, v))
        sim = torch.einsum("b h n d, b h n d w -> b h n w", q, k) * (d // h) ** -0.5
        at = torch.arange(n, device=x.device)[:, None]
        keys = at + torch.arange(-r, r + 1, device=x.device)
        sim = sim.masked_fill((keys < 0) | (keys >= n), -torch.finfo(sim.dtype).max)
        out = torch.einsum("b h n w, b h n d w -> b h n d", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))
