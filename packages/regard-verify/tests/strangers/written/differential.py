"""Differential attention: one softmax less a share of another: weights sum to less than 1."""

import math

import torch


def differential_attention(q, k, v, mask=None, lambda_full=0.3):
    """Queries and keys hold two halves [batch, heads, length, 2 * d]; mask: True is visible."""
    q1, q2 = q.chunk(2, dim=-1)
    k1, k2 = k.chunk(2, dim=-1)
    scale = 1 / math.sqrt(q1.shape[-1])
    length, keys = q.shape[-2], k.shape[-2]
    seen = torch.ones(length, keys, dtype=torch.bool, device=q.device).tril(keys - length)
    if mask is not None:
        seen = seen & mask
    first = (q1 @ k1.transpose(-2, -1) * scale).masked_fill(~seen, -1e9).softmax(dim=-1)
    second = (q2 @ k2.transpose(-2, -1) * scale).masked_fill(~seen, -1e9).softmax(dim=-1)
    return (first - lambda_full * second) @ v
