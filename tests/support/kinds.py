"""One layer of each kind, of width 32, with as many options as it takes."""

from regard import (
    Alibi,
    Attention,
    Causal,
    GroupedQueryAttention,
    LatentKVAttention,
    Llama3,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    Rotary,
    SelfAttention,
    SlidingWindow,
)

MLA = {
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "rope": Rotary(4, pairing="pairs"),
}
LAYERS = [
    SelfAttention(32, mask=Causal()),
    MultiHeadAttention(32, 4, bias=True, dropout=0.1),
    MultiQueryAttention(32, 4, rope=Rotary(8, scaling=Llama3(8.0)), mask=Causal()),
    GroupedQueryAttention(
        32,
        4,
        2,
        head_dim=6,
        bias={"q_proj", "v_proj"},
        out_bias=True,
        qk_norm="width",
        norm_eps=1e-5,
        rope=Rotary(4, theta=5e5),
        mask=Causal() & SlidingWindow(3),
        scale=0.5,
        score_bias=Alibi.for_heads(4),
        softcap=30.0,
        sinks=True,
        gate="head",
    ),
    Attention(32, 4, num_kv_heads=2, context_size=12, backend="eager"),
    MultiHeadLatentAttention(32, 4, **MLA, q_lora_rank=10, mask=Causal(), form="absorbed"),
    LatentKVAttention(32, 4, num_kv_heads=2, head_dim=8, kv_lora_rank=12, rope=Rotary(8)),
]
