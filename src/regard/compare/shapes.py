"""The sizes of the layers and caches that ran, from which `regard.plan` computes their costs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from regard.cache import Cache, KVCache, SlidingCache
from regard.cache.quantized import QuantizedCache
from regard.hf.placing.placed import window_of
from regard.layers.latent import LatentKVAttention, MultiHeadLatentAttention
from regard.masks import AllOf, Causal
from regard.plan.cost import Workload, cache_bytes
from regard.plan.shapes import STORAGES, LayerShape, Storage

PROJECTIONS = (
    "q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "o_proj",
)  # fmt: skip


def shape_of(layer: Any) -> LayerShape:
    """The sizes of a layer of regard. RoPE, scale and score bias, which cost nothing, are left out.

    Args:
        layer: `Attention`, `LatentKVAttention` or `MultiHeadLatentAttention`.

    Examples:
        >>> from regard import GroupedQueryAttention
        >>> from regard.compare.shapes import shape_of
        >>> shape = shape_of(GroupedQueryAttention(64, num_heads=8, num_kv_heads=2))
        >>> shape.kind, shape.num_kv_heads, shape.head_dim
        ('GQA', 2, 8)
    """
    rules = layer.mask.parts if isinstance(layer.mask, AllOf) else (layer.mask,)
    common: dict[str, Any] = {
        "hidden_size": layer.hidden_size,
        "num_heads": layer.num_heads,
        "window": window_of(layer),
        "causal": Causal() in rules,
        "bias": tuple(each for each in PROJECTIONS if _has_bias(layer, each)),
    }
    if isinstance(layer, MultiHeadLatentAttention):
        return LayerShape(
            **common,
            num_kv_heads=layer.num_heads,
            head_dim=layer.qk_head_dim,
            v_head_dim=layer.v_head_dim,
            kv_lora_rank=layer.kv_lora_rank,
            q_lora_rank=layer.q_lora_rank,
            qk_rope_head_dim=layer.qk_rope_head_dim,
            latent_norm=not isinstance(layer.kv_a_layernorm, nn.Identity),
        )
    common |= {
        "num_kv_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "v_head_dim": layer.head_dim,
        "qk_norm": None if layer.q_norm is None else "width" if layer.norm_width else "head",
        "softcap": layer.softcap,
    }
    if isinstance(layer, LatentKVAttention):
        return LayerShape(**common, kv_lora_rank=layer.kv_lora_rank, keys_by_position=True)
    gate = None if layer.gate_proj is None else layer.gate_proj.out_features
    per_head = gate == layer.num_heads
    return LayerShape(
        **common,
        sinks=layer.sinks is not None,
        gate=None if gate is None else "head" if per_head else "channel",
    )


def storage_of(caches: Sequence[Cache], windows: Sequence[int | None] = ()) -> Storage | None:
    """How caches store keys and values; None if `regard.plan` has no formula for it.

    Args:
        caches: of a model, one for each layer.
        windows: of the layers; none of them has one if there are none.

    Examples:
        >>> from regard import QuantizedCache
        >>> from regard.compare.shapes import storage_of
        >>> storage_of([QuantizedCache(bits=4, group=32)])
        Storage(name='int4', key_bits=4, value_bits=4, group=32, page_size=0)
    """
    from regard.cache.quantized import QuantizedWindow

    found = set()
    for cache, window in zip(caches, windows or [None] * len(caches), strict=True):
        plain, codes = (
            KVCache if window is None else SlidingCache,
            (QuantizedCache if window is None else QuantizedWindow),
        )
        if type(cache) is plain:
            found.add(STORAGES["plain"])
        elif type(cache) is codes:
            stored = cache.format
            found.add(Storage(stored.name, stored.key_bits, stored.value_bits, stored.group))
        else:
            return None
    return found.pop() if len(found) == 1 else None


def bytes_of_caches(
    layers: Sequence[LayerShape], storage: Storage, *, context: int, dtype: str
) -> int:
    """Bytes in the caches of all layers, as `regard.plan` counts them.

    Args:
        layers: of a model.
        storage: of their caches.
        context: tokens.
        dtype: of numbers that are not codes.

    Examples:
        >>> from regard import GroupedQueryAttention
        >>> from regard.compare.shapes import bytes_of_caches, shape_of
        >>> from regard.plan import STORAGES
        >>> layers = [shape_of(GroupedQueryAttention(64, num_heads=8, num_kv_heads=2))] * 3
        >>> bytes_of_caches(layers, STORAGES["plain"], context=10, dtype="float16")
        1920
    """
    work = Workload(context=context, dtype=dtype)
    counts = Counter(layers).items()
    return sum(cache_bytes(layer, storage, work) * count for layer, count in counts)


def _has_bias(layer: nn.Module, name: str) -> bool:
    return getattr(getattr(layer, name, None), "bias", None) is not None
