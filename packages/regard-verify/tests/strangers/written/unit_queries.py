"""Queries and keys are normalised, with a learned gain for each head; scores have no scale."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, heads, dim):
        super().__init__()
        self.size, self.gain = dim**0.5, nn.Parameter(torch.ones(heads, 1, dim))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.size * self.gain


class NormalisedAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.q_norm, self.k_norm = (RMSNorm(heads, dim // heads) for _ in "qk")
        self.to_q, self.to_out = (nn.Linear(dim, dim, bias=False) for _ in "qo")
        self.to_kv = nn.Linear(dim, dim * 2, bias=False)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, mask=None):
        x = self.norm(x)
        q, k, v = map(self.split, (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1)))
        dots = self.q_norm(q) @ self.k_norm(k).transpose(-1, -2)
        if mask is not None:
            dots = dots.masked_fill(~mask[:, None, None, :], -torch.finfo(dots.dtype).max)
        out = dots.softmax(dim=-1) @ v
        return self.to_out(out.transpose(1, 2).flatten(2))
