"""Facts that the table of families reads of newer models: keys of other layers, keys that are
values, gates, and queries scaled by position."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from regard.heads import split_heads
from regard.layers.query_scale import UNSCALED, PositionScale, QueryScale


def shared_by_type(module: Any) -> tuple[str, str]:
    """Gemma 3n and 4: the last layers read those of the last layer before them of their type."""
    name: str = module.layer_type
    return name * module.is_kv_shared_layer, name * module.store_full_length_kv


def proportional_runs(module: Any) -> tuple[tuple[int, int], ...] | None:
    """Gemma 4, where one projection makes keys and values that no other layer reads, and where only
    the first channels of each half are rotated."""
    if not module.use_alternative_attention or any(shared_by_type(module)):
        return None
    rope, half = module.config.rope_parameters[module.layer_type], module.head_dim // 2
    rotated = int(rope.get("partial_rotary_factor", 1.0) * half)
    if rope["rope_type"] != "proportional" or rotated == half:
        return None
    return ((0, rotated), (half, half + rotated))


def gated_by(child: str) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """The gate is the sigmoid of a child's output: one factor for each head or each channel."""

    def gate(module: Any, x: Tensor, out: Tensor) -> Tensor:
        factor = getattr(module, child)(x).float().sigmoid()
        return out * split_heads(factor, factor.shape[-1] // out.shape[1]).to(out.dtype)

    return gate


def ministral_scale(module: Any) -> QueryScale:
    rope = module.config.rope_parameters
    return PositionScale(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])


def llama4_scale(module: Any) -> QueryScale:
    if module.use_rope or not module.attn_temperature_tuning:
        return UNSCALED
    return PositionScale(module.attn_scale, module.floor_scale, offset=1)
