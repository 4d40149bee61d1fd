"""What single architectures read in their own way: kinds of layers, heads, scales and reasons."""

from typing import Any

from regard.plan.building import CHUNKED, FULL, LINEAR, SLIDING, Place
from regard.plan.reading import UNKNOWN, Keys

NO_CROSS = "add_cross_attention"


def used_window(keys: Keys) -> int | None:
    return keys.optional_size("sliding_window") if keys.flag("use_sliding_window") else None


def late_windows(keys: Keys, count: int) -> list[str]:
    """Windows from layer `max_window_layers` on (Qwen2)."""
    first = keys.get("max_window_layers")
    if type(first) is not int or first < 0:
        raise keys.refused("max_window_layers", "a whole number", first)
    used = used_window(keys) is not None
    return [SLIDING if used and at >= first else FULL for at in range(count)]


def even_early_windows(keys: Keys, count: int) -> list[str]:
    """Windows in even layers before `max_window_layers` (Qwen2-MoE)."""
    late = late_windows(keys, count)
    used = keys.flag("use_sliding_window")
    return [SLIDING if used and at % 2 == 0 and late[at] == FULL else FULL for at in range(count)]


def all_used(keys: Keys, count: int) -> list[str]:
    return [FULL if used_window(keys) is None else SLIDING] * count


def roped(keys: Keys, count: int) -> list[bool]:
    """Which layers have RoPE: `no_rope_layers` is 1 for those that have it."""
    period = keys.size("no_rope_layer_interval")
    listed = keys.flags("no_rope_layers", count) if keys.get("no_rope_layers") else None
    return listed or [bool((at + 1) % period) for at in range(count)]


def smollm3_kinds(keys: Keys, count: int) -> list[str]:
    used = used_window(keys) is not None
    return [SLIDING if used and not rotated else FULL for rotated in roped(keys, count)]


def llama4_kinds(keys: Keys, count: int) -> list[str]:
    return [CHUNKED if rotated else FULL for rotated in roped(keys, count)]


def llama4_unsupported(keys: Keys, place: Place) -> str:
    normed, tuned = keys.flag("use_qk_norm"), keys.get("attn_temperature_tuning")  # a number once
    if place.rotated:
        return "queries and keys are normalised after RoPE" if normed else ""
    return "queries are scaled by their position (attn_temperature_tuning)" if tuned else ""


def jamba_kinds(keys: Keys, count: int) -> list[str]:
    period, offset = keys.size("attn_layer_period"), keys.get("attn_layer_offset")
    if type(offset) is not int or not 0 <= offset < period:
        raise keys.refused("attn_layer_offset", f"a whole number of 0 to {period - 1}", offset)
    return [FULL if at % period == offset else LINEAR for at in range(count)]


def shared_keys(keys: Keys, kinds: list[str]) -> list[int | None]:
    """The last `num_kv_shared_layers` use those of the last layer of their kind before them."""
    count, shared = len(kinds), keys.get("num_kv_shared_layers")
    if type(shared) is not int or not 0 <= shared < count:
        raise keys.refused("num_kv_shared_layers", f"a whole number below {count}", shared)
    first = count - shared
    last = {kind: at for at, kind in enumerate(kinds[:first])}
    for kind in kinds[first:]:
        if kind not in last:
            rule = f"so few that a layer of {kind!r} comes before those that share"
            raise keys.refused("num_kv_shared_layers", rule, shared)
    return [None] * first + [last[kind] for kind in kinds[first:]]


def not_rotated(keys: Keys, kinds: list[str]) -> list[bool]:
    """No layer has RoPE."""
    return [False] * len(kinds)


def one_direction(keys: Keys) -> bool:
    if keys.flag("use_bidirectional_attention"):
        rule = "false: only causal attention of this architecture is described"
        raise keys.refused("use_bidirectional_attention", rule, True, UNKNOWN)
    return True


def encoder(keys: Keys) -> bool:
    """Causal if it is a decoder; cross-attention is refused."""
    no_cross(keys)
    if keys.get("position_embedding_type") not in (None, "absolute"):
        came = keys.get("position_embedding_type")
        raise keys.refused("position_embedding_type", "'absolute'", came, UNKNOWN)
    return keys.flag("is_decoder")


def no_cross(keys: Keys) -> bool:
    if keys.flag(NO_CROSS):
        rule = "false: the cache of cross-attention follows another sequence"
        raise keys.refused(NO_CROSS, rule, True, UNKNOWN)
    return True


def gpt2_scale(keys: Keys, head_dim: int, place: Place) -> float | None:
    scale = head_dim**-0.5 if keys.flag("scale_attn_weights") else 1.0
    scale /= place.number
    return None if scale == head_dim**-0.5 else scale


def falcon_heads(keys: Keys) -> int:
    old = not keys.flag("new_decoder_architecture")
    if old and keys.flag("multi_query"):
        keys.optional_size("num_key_value_heads")
        return 1
    own = keys.get("num_key_value_heads") is not None
    return keys.heads("num_key_value_heads" if own else "num_attention_heads")


def falcon_remarks(keys: Keys) -> tuple[str, ...]:
    return ("Scores have ALiBi's bias instead of RoPE.",) if keys.flag("alibi") else ()


def clipped(keys: Keys, place: Place) -> str:
    if keys.optional_number("clip_qkv") is None:
        return ""
    return "queries, keys and values are clipped (clip_qkv)"


def cohere_norm(keys: Keys, place: Place) -> str:
    return "each head has a LayerNorm of its own" if keys.flag("use_qk_norm") else ""


def no_bias(keys: Keys) -> tuple[str, ...]:
    """Biases are refused: the gate, which is half of `q_proj`, would have one (Qwen3-Next)."""
    if keys.flag("attention_bias"):
        raise keys.refused("attention_bias", "false: gates with a bias are not described", True)
    return ()


def pairs_if_interleaved(keys: Keys) -> Any:
    return "pairs" if keys.flag("rope_interleave") else "halves"
