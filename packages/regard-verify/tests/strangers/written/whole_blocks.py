"""Attention inside blocks alone, for sequences of whole blocks."""

from torch import nn


class BlockAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int, block_size: int = 4):
        super().__init__()
        self.num_heads, self.block_size = num_heads, block_size
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        assert N % self.block_size == 0, f"length {N} must be a multiple of {self.block_size}"
        x = x.reshape(-1, self.block_size, C)
        qkv = self.qkv(x).reshape(-1, self.block_size, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attn = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
        x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)
