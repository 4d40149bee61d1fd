"""A Llama layer whose rotation is one complex table, kept as a buffer."""

import torch
import torch.nn.functional as F
from torch import nn


def rotary_table(dim: int, length: int, theta: float = 10000.0) -> torch.Tensor:
    rates = theta ** -(torch.arange(0, dim, 2).float() / dim)
    angles = torch.arange(length).float().outer(rates)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table[:, None]).flatten(-2).type_as(x)


class LlamaAttention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, max_seq_len: int = 512):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        table = rotary_table(self.head_dim, max_seq_len)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: torch.Tensor, cache=None):
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.n_heads, self.head_dim)
        k = self.wk(x).view(batch, length, self.n_kv_heads, self.head_dim)
        v = self.wv(x).view(batch, length, self.n_kv_heads, self.head_dim)
        start = 0 if cache is None else cache[0].shape[1]
        here = self.table[start : start + length]
        q, k = rotate(q, here), rotate(k, here)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        present = (k, v)
        times = self.n_heads // self.n_kv_heads
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        seen = torch.ones(length, k.shape[2], dtype=torch.bool, device=x.device)
        seen = seen.tril(k.shape[2] - length)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1)), present
