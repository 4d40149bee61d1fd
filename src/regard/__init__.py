"""Attention layers that are right, fast and cache-aware, on PyTorch.

Four constants are neutral values: they stand where an argument is not given.

Examples:
    >>> import torch
    >>> from regard import EVERYTHING, NOTHING, NO_CACHE, NO_ROPE, Causal, attend
    >>> Causal() & EVERYTHING, Causal() | NOTHING  # neutral masks
    (Causal(), Causal())
    >>> x = torch.ones(1, 1, 2, 4)
    >>> attend(x, x, x, mask=NOTHING).sum().item()  # fully masked rows are 0
    0.0
    >>> NO_CACHE.length, NO_ROPE.dim  # no tokens held, no channels rotated
    (0, 0)
"""

from regard.cache import (
    NO_CACHE,
    Cache,
    KVCache,
    PagedCache,
    PagePool,
    Part,
    QuantizedCache,
    SlidingCache,
    StaticCache,
)
from regard.first_calls import call_vector_functions as _call_vector_functions
from regard.layers.attention import (
    Attention,
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiQueryAttention,
    SelfAttention,
)
from regard.layers.latent import LatentKVAttention, MultiHeadLatentAttention
from regard.layers.memory import Memory
from regard.masks import (
    EVERYTHING,
    NOTHING,
    Causal,
    Chunked,
    Dense,
    Documents,
    Everything,
    Mask,
    Nothing,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
    Tree,
    Where,
)
from regard.ops.attend import attend, attend_partial, prepare
from regard.ops.bias import Alibi, RelativeBias, split_additive
from regard.ops.call import Call
from regard.ops.explain import attention_weights, explain
from regard.ops.partial import Partial, merge
from regard.ops.prepared import Prepared
from regard.rope import NO_ROPE, Rotary
from regard.rope.scaling import NTK, Frequencies, LinearScaling, Llama3, LongRope, Yarn
from regard.sparse import EvictingCache, SelectingCache

__version__ = "0.2.0"

_call_vector_functions()

__all__ = [
    "EVERYTHING",
    "NOTHING",
    "NO_CACHE",
    "NO_ROPE",
    "NTK",
    "Alibi",
    "Attention",
    "Cache",
    "Call",
    "Causal",
    "Chunked",
    "Dense",
    "Documents",
    "Everything",
    "EvictingCache",
    "Frequencies",
    "GroupedQueryAttention",
    "KVCache",
    "LatentKVAttention",
    "LinearScaling",
    "Llama3",
    "LongRope",
    "Mask",
    "Memory",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiQueryAttention",
    "Nothing",
    "Padding",
    "PagePool",
    "PagedCache",
    "Part",
    "Partial",
    "Prefix",
    "Prepared",
    "QuantizedCache",
    "RelativeBias",
    "Rotary",
    "SelectingCache",
    "SelfAttention",
    "SlidingCache",
    "SlidingWindow",
    "Span",
    "StaticCache",
    "Tree",
    "Where",
    "Yarn",
    "attend",
    "attend_partial",
    "attention_weights",
    "explain",
    "merge",
    "prepare",
    "split_additive",
]
