"""Calls whose queries are split into small blocks: the sizes, masks and tensors of those tests."""

import torch

from regard import (
    EVERYTHING,
    NOTHING,
    Causal,
    Chunked,
    Dense,
    Documents,
    Padding,
    Prefix,
    SlidingWindow,
)

WINDOW = Causal() & SlidingWindow(6)
DOCUMENTS = Documents(torch.tensor([0] * 9 + [1] * 4 + [0] * 3 + [2] * 7))
MASKS = {
    "everything": EVERYTHING,
    "nothing": NOTHING,
    "causal": Causal(),
    "window": WINDOW,
    "window before": SlidingWindow(9) & ~SlidingWindow(2),
    "chunks": Causal() & Chunked(7),
    "chunks by row": Causal() & Chunked(7, start=torch.tensor([0, 3])),
    "prefix and window": WINDOW | Prefix(3),
    "documents": Causal() & DOCUMENTS,
    "documents by row": Documents((torch.arange(46).view(2, 23) % 23) // torch.tensor([[5], [8]])),
    "padding": Causal() & Padding.from_lengths([23, 8]),
    "padding on the left": Causal() & Padding(torch.arange(23) > torch.tensor([[0], [17]])),
    "dense": Dense(torch.rand(2, 4, 23, 23, generator=torch.Generator().manual_seed(0)) < 0.3),
    "holes": Padding((torch.arange(23) % 9 < 2)[None]),
}
BLOCKS = [5, 1, 8]


def tensors(length=23, batch=2, heads=4, kv_heads=2, dim=3, v_dim=3, dtype=torch.float64):
    q = torch.randn(batch, heads, length, dim, dtype=dtype)
    k = torch.randn(batch, kv_heads, length, dim, dtype=dtype)
    return q, k, torch.randn(batch, kv_heads, length, v_dim, dtype=dtype)
