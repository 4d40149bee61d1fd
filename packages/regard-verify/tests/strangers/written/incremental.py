"""Attention of a sequence model that keeps its keys in a dictionary which its decoder hands on.

A step of the decoder is one token and has no mask.
"""

import torch
from torch import nn


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim) for _ in range(4)
        )

    def heads(self, x):
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def forward(self, query, key, value, incremental_state=None, attn_mask=None):
        q = self.heads(self.q_proj(query)) * self.head_dim**-0.5
        k, v = self.heads(self.k_proj(key)), self.heads(self.v_proj(value))
        if incremental_state is not None:
            if "keys" in incremental_state:
                k = torch.cat([incremental_state["keys"], k], dim=2)
                v = torch.cat([incremental_state["values"], v], dim=2)
            incremental_state["keys"], incremental_state["values"] = k, v
        scores = q @ k.transpose(-1, -2)
        if attn_mask is not None:
            if incremental_state is not None:
                raise ValueError("a step of the decoder has no mask")
            scores = scores.masked_fill(attn_mask, -1e30)
        out = scores.softmax(dim=-1) @ v
        return self.out_proj(out.transpose(1, 2).flatten(2)), None
