"""The public names of `regard`, which loads them at the first use of any."""

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
from regard.layers.attention import (
    Attention,
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiQueryAttention,
    SelfAttention,
)
from regard.layers.forms.differential import DifferentialAttention
from regard.layers.forms.shared_kv import SharedCache, SharedKVAttention
from regard.layers.forms.tied_kv import TiedKVAttention
from regard.layers.latent import LatentKVAttention, MultiHeadLatentAttention
from regard.layers.memory import Memory
from regard.layers.query_scale import UNSCALED, PositionScale
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

__all__ = [
    "EVERYTHING",
    "NOTHING",
    "NO_CACHE",
    "NO_ROPE",
    "NTK",
    "UNSCALED",
    "Alibi",
    "Attention",
    "Cache",
    "Call",
    "Causal",
    "Chunked",
    "Dense",
    "DifferentialAttention",
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
    "PositionScale",
    "Prefix",
    "Prepared",
    "QuantizedCache",
    "RelativeBias",
    "Rotary",
    "SelectingCache",
    "SelfAttention",
    "SharedCache",
    "SharedKVAttention",
    "SlidingCache",
    "SlidingWindow",
    "Span",
    "StaticCache",
    "TiedKVAttention",
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
