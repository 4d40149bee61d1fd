"""What does absorbing save? A whole MLA layer's decode step against transformers', latents cached.

    python benchmarks/decode_mla.py

Targets: transformers takes 20x the time at 4,096 tokens and 37x at 16,384 in float32, 20x and 40x
in bfloat16.

Both hold the same weights and the same latents. transformers caches the latent too, and rebuilds
every key and value at each step.
"""

import argparse
from typing import NamedTuple

import torch
from common import THREADS, card, finish, interleave, summary
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from regard import Causal, KVCache, MultiHeadLatentAttention, Rotary

HIDDEN, HEADS, RANK, NOPE, ROPE, VALUE = 2048, 16, 512, 128, 64, 128
TARGETS = {
    (torch.float32, 4096): 20,
    (torch.float32, 16384): 37,
    (torch.bfloat16, 4096): 20,
    (torch.bfloat16, 16384): 40,
}


class Sizes(NamedTuple):
    """Of one layer."""

    hidden: int = HIDDEN
    heads: int = HEADS
    rank: int = RANK
    nope: int = NOPE
    rope: int = ROPE
    value: int = VALUE


SIZES = Sizes()


def theirs(
    dtype: torch.dtype, sizes: Sizes = SIZES
) -> tuple[DeepseekV3Attention, DeepseekV3RotaryEmbedding]:
    config = DeepseekV3Config(
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        q_lora_rank=None,
        kv_lora_rank=sizes.rank,
        qk_nope_head_dim=sizes.nope,
        qk_rope_head_dim=sizes.rope,
        v_head_dim=sizes.value,
        num_hidden_layers=1,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attn_implementation="sdpa",
    )
    return DeepseekV3Attention(config, 0).to(dtype).eval(), DeepseekV3RotaryEmbedding(config)


def ours(
    peer: DeepseekV3Attention, dtype: torch.dtype, sizes: Sizes = SIZES
) -> MultiHeadLatentAttention:
    layer = MultiHeadLatentAttention(
        sizes.hidden,
        sizes.heads,
        kv_lora_rank=sizes.rank,
        qk_nope_head_dim=sizes.nope,
        qk_rope_head_dim=sizes.rope,
        v_head_dim=sizes.value,
        rope=Rotary(sizes.rope, pairing="pairs"),
        mask=Causal(),
    )
    layer.load_state_dict(peer.state_dict())
    return layer.to(dtype).eval()


def case(dtype: torch.dtype, past: int, rounds: int) -> dict[str, object]:
    peer, rotary = theirs(dtype)
    layer = ours(peer, dtype)
    x, new = torch.randn(1, past, HIDDEN).to(dtype), torch.randn(1, 1, HIDDEN).to(dtype)
    cos, sin = rotary(x, torch.arange(past + 1)[None])
    latent = torch.randn(1, 1, past, RANK).to(dtype)
    k_rope = torch.randn(1, 1, past, ROPE).to(dtype)
    cache = KVCache()
    cache.update(torch.cat([latent, paired(k_rope)], dim=-1))
    held = DynamicCache()
    held.update(latent, k_rope, 0)

    def step_of_theirs() -> torch.Tensor:
        slot = held.layers[0]
        slot.keys, slot.values = latent, k_rope
        out: torch.Tensor = peer(new, (cos[:, past:], sin[:, past:]), None, past_key_values=held)[0]
        return out

    def step_of_ours() -> torch.Tensor:
        cache.truncate(past)
        return layer(new, cache=cache)

    gap = (step_of_theirs() - step_of_ours()).abs().max() / step_of_theirs().abs().max()
    name = str(dtype).removeprefix("torch.")
    variants = {"transformers": step_of_theirs, "regard": step_of_ours}
    rows = summary(interleave(variants, rounds=rounds), "regard")
    card(f"MLA layer, one step after {past:,} tokens, {name}", rows, "regard")
    target = TARGETS.get((dtype, past))
    print(f"  relative difference {gap:.1e}; target: {target or 'none'}")
    return {
        "dtype": name,
        "past": past,
        "target": target,
        "relative_difference": float(gap),
        "rows": rows,
    }


def paired(x: torch.Tensor) -> torch.Tensor:
    """From halves, as transformers caches the rotary key, to pairs, as the weights have it."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--past", type=int, nargs="+", default=[1024, 4096, 16384])
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(f"{THREADS} threads, {HEADS} heads, rank {RANK}+{ROPE}, hidden {HIDDEN}")
    results = [
        case(dtype, past, options.rounds)
        for dtype in (torch.float32, torch.bfloat16)
        for past in options.past
    ]
    finish("decode_mla", results)


if __name__ == "__main__":
    main()
