"""Attention with learned keys and values before those of the tokens; outputs of padding are 0."""

import torch
from torch import nn


class MemoryAttention(nn.Module):
    def __init__(self, dim, heads, memory=2):
        super().__init__()
        self.heads = heads
        self.memory = nn.Parameter(torch.randn(2, heads, memory, dim // heads))
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, mask=None, causal=False):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        known = self.memory.shape[2]
        k, v = (
            torch.cat([m.expand(b, -1, -1, -1), t], dim=2)
            for m, t in zip(self.memory, (k, v), strict=True)
        )
        sim = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if mask is not None:
            keep = torch.cat([mask.new_ones(b, known), mask], dim=1)
            sim = sim.masked_fill(~keep[:, None, None], -torch.finfo(sim.dtype).max)
        if causal:
            later = torch.ones(n, n + known, dtype=torch.bool, device=x.device).triu(known + 1)
            sim = sim.masked_fill(later, -torch.finfo(sim.dtype).max)
        out = self.to_out((sim.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, d))
        return out if mask is None else out.masked_fill(~mask[..., None], 0.0)
