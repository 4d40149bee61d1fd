"""Causal attention whose scores are bounded, as in Gemma 2 (arXiv:2408.00118)."""

import torch
from torch import nn


class CappedAttention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, softcapping=20.0):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.softcapping = n_heads, n_kv_heads, softcapping
        self.head_dim = dim // n_heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = (
            nn.Linear(dim, n_kv_heads * self.head_dim, bias=False) for _ in "kv"
        )
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, self.n_heads, -1).transpose(1, 2)
        k, v = (
            p(x)
            .view(b, n, self.n_kv_heads, -1)
            .repeat_interleave(self.n_heads // self.n_kv_heads, dim=2)
            .transpose(1, 2)
            for p in (self.k_proj, self.v_proj)
        )
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        scores = self.softcapping * torch.tanh(scores / self.softcapping)
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(b, n, -1))
