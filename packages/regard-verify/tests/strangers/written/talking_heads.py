"""Talking heads (arXiv:2003.02436): a learned mixture of the scores of all heads is added."""

import torch
from torch import nn


class TalkingHeads(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.mix = nn.Conv2d(heads, heads, 1, bias=False)
        nn.init.dirac_(self.mix.weight)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        sim = sim + self.mix(sim)
        out = torch.einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))
