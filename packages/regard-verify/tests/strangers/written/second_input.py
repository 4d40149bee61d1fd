"""Attention whose keys come from a second input, which a self-attention gives as well."""

import torch.nn.functional as F
from torch import nn


class SharedAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = (nn.Linear(dim, dim, bias=False) for _ in "qk")
        self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in "vo")

    def forward(self, x, y=None):
        if y is None:
            raise ValueError("y is needed where there is no cache")
        split = (self.heads, x.shape[-1] // self.heads)
        q = self.q_proj(x).unflatten(-1, split).transpose(1, 2)
        k, v = (p(y).unflatten(-1, split).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(out.transpose(1, 2).flatten(2))
