"""Pictures: masks, maps of a model's attention, and pages to explore.

Examples:
    >>> import torch
    >>> from regard import Causal, MultiHeadAttention
    >>> from regard.see import attention
    >>> layer = MultiHeadAttention(16, 4, mask=Causal())
    >>> attention(layer, torch.randn(1, 6, 16)).overview.shape  # layers, heads, rows, columns
    torch.Size([1, 4, 6, 6])
"""

from regard.see.grammar import mask_from
from regard.see.maps import AttentionMaps, find
from regard.see.maps_of_model import attention
from regard.see.pool_picture import pool_svg, pool_text

__all__ = [
    "AttentionMaps",
    "attention",
    "find",
    "mask_from",
    "pool_svg",
    "pool_text",
]
