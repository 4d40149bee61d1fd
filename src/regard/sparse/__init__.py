"""Attention to some of the cached tokens: caches that evict the others, or do not read them.

Examples:
    >>> import torch
    >>> from regard import Attention, Causal
    >>> from regard.sparse import EvictingCache, Streaming
    >>> layer = Attention(8, 2, mask=Causal()).eval()
    >>> cache = EvictingCache(8, Streaming(), sinks=2, recent=4)
    >>> with torch.no_grad():
    ...     _ = layer(torch.randn(1, 20, 8), cache=cache)
    >>> cache.slots[0, 0].tolist()  # the first two, and the last ones
    [0, 1, 14, 15, 16, 17, 18, 19]
"""

from regard.sparse.condensed import condense
from regard.sparse.condensing import CondensingCache
from regard.sparse.evicting import EvictingCache
from regard.sparse.moments import QueryMoments
from regard.sparse.quantized import QuantizedEvicting
from regard.sparse.scores import (
    H2O,
    TOVA,
    ExpectedAttention,
    KeyDiff,
    Rows,
    Score,
    SnapKV,
    Streaming,
)
from regard.sparse.selecting import SelectingCache
from regard.sparse.slots import AtSlots

__all__ = [
    "H2O",
    "TOVA",
    "AtSlots",
    "CondensingCache",
    "EvictingCache",
    "ExpectedAttention",
    "KeyDiff",
    "QuantizedEvicting",
    "QueryMoments",
    "Rows",
    "Score",
    "SelectingCache",
    "SnapKV",
    "Streaming",
    "condense",
]
