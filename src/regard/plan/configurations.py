"""The architectures of `config.json` that can be described, one row each.

`tests/plan/test_configurations.py` compares every row with the model that transformers builds.
"""

from collections.abc import Mapping
from typing import Any

from regard.plan import differences
from regard.plan.building import (
    CHUNKED,
    FULL,
    LINEAR,
    QKV,
    QKVO,
    SLIDING,
    Architecture,
    always,
    delta_layer,
    every,
    inverse_root,
    latent_layer,
    mamba_layer,
    plain_layer,
    rope_by_kind,
    uniform,
)

# names with a word of `MATTERS` that neither change what is cached nor what is visible
HARMLESS = frozenset(
    {
        "use_cache",
        "attention_dropout",
        "attn_pdrop",
        "attention_probs_dropout_prob",
        "classifier_dropout",
        "cache_implementation",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "output_attentions",
        "use_flash_attn",
        "tie_word_embeddings",
        "decoder_sparse_step",
        "n_shared_experts",
        "num_shared_experts",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "final_logit_softcapping",
        "summary_use_proj",
    }
)
ALL = dict.fromkeys((FULL, SLIDING), plain_layer)


def _defaults(max_position_embeddings: int, rope_theta: float = 1e4, **others: Any) -> Any:
    return {"max_position_embeddings": max_position_embeddings, "rope_theta": rope_theta} | others


def _sizes(hidden_size: int, num_hidden_layers: int, num_attention_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
    }


_QWEN2 = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256}
_LATENT: dict[str, Any] = {
    "builders": {FULL: latent_layer},
    "ignored": frozenset({"head_dim", "qk_head_dim"}),
}


_ENCODER: dict[str, Any] = {
    "bias": always(QKVO),
    "rotates": differences.not_rotated,
    "causal": differences.encoder,
    "kv_heads": lambda keys: keys.heads("num_attention_heads"),
}
_NO_BIAS: dict[str, Any] = {"bias": always(())}
_QKV_BIAS = always(QKV)
_HEAD = always("head")
_PAIRS = always("pairs")

CONFIGURATIONS: Mapping[str, Architecture] = {
    "llama": Architecture(
        attention="LlamaAttention",
        defaults=_defaults(2048),
        sizes=_sizes(4096, 32, 32),
        ignored=frozenset({"rope_interleaved"}),
    ),
    "mistral": Architecture(
        attention="MistralAttention",
        defaults=_defaults(131072, num_key_value_heads=8, sliding_window=4096),
        sizes=_sizes(4096, 32, 32),
        builders=ALL,
        kinds=uniform,
        **_NO_BIAS,
    ),
    "ministral": Architecture(
        attention="MinistralAttention",
        defaults=_defaults(131072, num_key_value_heads=8, sliding_window=4096),
        builders=ALL,
        kinds=uniform,
        typed=True,
        **_NO_BIAS,
    ),
    "mixtral": Architecture(
        attention="MixtralAttention",
        defaults=_defaults(131072, 1e6, num_key_value_heads=8),
        builders=ALL,
        kinds=uniform,
        **_NO_BIAS,
    ),
    "qwen2": Architecture(
        attention="Qwen2Attention",
        defaults=_defaults(32768, num_key_value_heads=32, **_QWEN2),
        sizes=_sizes(4096, 32, 32),
        builders=ALL,
        kinds=differences.late_windows,
        typed=True,
        window=differences.used_window,
        bias=_QKV_BIAS,
    ),
    "qwen2_moe": Architecture(
        attention="Qwen2MoeAttention",
        defaults=_defaults(32768, num_key_value_heads=16, qkv_bias=True, **_QWEN2),
        builders=ALL,
        kinds=differences.even_early_windows,
        typed=True,
        window=differences.used_window,
        bias=lambda keys: QKV if keys.flag("qkv_bias") else (),
    ),
    "qwen3": Architecture(
        attention="Qwen3Attention",
        defaults=_defaults(32768, num_key_value_heads=32, head_dim=128, **_QWEN2),
        sizes=_sizes(4096, 32, 32),
        builders=ALL,
        kinds=differences.late_windows,
        typed=True,
        window=differences.used_window,
        qk_norm=_HEAD,
    ),
    "qwen3_moe": Architecture(
        attention="Qwen3MoeAttention",
        defaults=_defaults(32768, num_key_value_heads=4, sliding_window=4096),
        builders=ALL,
        kinds=differences.all_used,
        window=differences.used_window,
        qk_norm=_HEAD,
        ignored=frozenset({"max_window_layers"}),
    ),
    "qwen3_next": Architecture(
        attention="Qwen3NextAttention",
        defaults=_defaults(32768, num_key_value_heads=2, head_dim=256)
        | {"partial_rotary_factor": 0.25, "full_attention_interval": 4}
        | {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32},
        builders={FULL: plain_layer, LINEAR: delta_layer},
        kinds=every("full_attention_interval", LINEAR),
        typed=True,
        bias=differences.no_bias,
        qk_norm=_HEAD,
        gate="channel",
    ),
    "phi3": Architecture(
        attention="Phi3Attention",
        defaults=_defaults(4096, original_max_position_embeddings=4096),
        builders=ALL,
        kinds=uniform,
        renamed_ropes={"su": "longrope", "yarn": "longrope"},
        ignored=frozenset({"attention_bias", "full_attn_mod"}),
        **_NO_BIAS,
    ),
    "gemma": Architecture(
        attention="GemmaAttention",
        defaults=_defaults(8192, num_key_value_heads=16, head_dim=256),
        causal=differences.one_direction,
    ),
    "gemma2": Architecture(
        attention="Gemma2Attention",
        defaults=_defaults(8192, num_key_value_heads=4, sliding_window=4096, **_GEMMA)
        | {"attn_logit_softcapping": 50.0, "period": 2},
        builders=ALL,
        kinds=every("period", SLIDING),
        typed=True,
        scale=inverse_root("query_pre_attn_scalar"),
        softcap="attn_logit_softcapping",
        causal=differences.one_direction,
    ),
    "gemma3_text": Architecture(
        attention="Gemma3Attention",
        defaults=_defaults(131072, 1e6, num_key_value_heads=4, sliding_window=4096, **_GEMMA)
        | {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4},
        sizes=_sizes(2304, 26, 8),
        names={"sliding_window_pattern": "sliding_window_pattern"},
        builders=ALL,
        kinds=every("sliding_window_pattern", SLIDING),
        typed=True,
        rope=rope_by_kind("rope_local_base_freq"),
        scale=inverse_root("query_pre_attn_scalar"),
        softcap="attn_logit_softcapping",
        qk_norm=_HEAD,
        causal=differences.one_direction,
        ignored=frozenset({"_sliding_window_pattern"}),
    ),
    "gemma3n_text": Architecture(
        attention="Gemma3nTextAttention",
        defaults=_defaults(32768, 1e6, num_key_value_heads=2, sliding_window=512, head_dim=256)
        | {"num_kv_shared_layers": 15, "period": 5, "rope_local_base_freq": 1e4},
        sizes=_sizes(2048, 35, 8),
        builders=ALL,
        kinds=every("period", SLIDING),
        typed=True,
        rope=rope_by_kind("rope_local_base_freq"),
        keys_of=differences.shared_keys,
        scale=always(1.0),
        qk_norm=_HEAD,
        unsupported=always("values are normalised"),
        ignored=frozenset({"activation_sparsity_pattern", "laurel_rank"}),
    ),
    "smollm3": Architecture(
        attention="SmolLM3Attention",
        defaults=_defaults(32768, 2e6, num_key_value_heads=4, no_rope_layer_interval=4),
        builders=ALL,
        kinds=differences.smollm3_kinds,
        typed=True,
        window=differences.used_window,
        rotates=lambda keys, kinds: differences.roped(keys, len(kinds)),
        ignored=frozenset({"max_window_layers", "sliding_window"}),
    ),
    "olmo": Architecture(
        attention="OlmoAttention", defaults=_defaults(2048), unsupported=differences.clipped
    ),
    "olmo2": Architecture(
        attention="Olmo2Attention", defaults=_defaults(2048), qk_norm=always("width")
    ),
    "olmo3": Architecture(
        attention="Olmo3Attention",
        defaults=_defaults(2048, 5e5, sliding_window=4096, period=4),
        builders=ALL,
        kinds=every("period", SLIDING),
        typed=True,
        rope=rope_by_kind("rope_theta"),
        qk_norm=always("width"),
    ),
    "starcoder2": Architecture(
        attention="Starcoder2Attention",
        defaults=_defaults(4096, num_key_value_heads=2, use_bias=True),
        builders=ALL,
        kinds=uniform,
        bias=lambda keys: QKVO if keys.flag("use_bias") else (),
    ),
    "gpt_oss": Architecture(
        attention="GptOssAttention",
        defaults=_defaults(131072, 150000.0, num_key_value_heads=8, head_dim=64)
        | {"sliding_window": 128, "attention_bias": True, "period": 2},
        builders=ALL,
        kinds=every("period", SLIDING),
        typed=True,
        sinks=True,
        ignored=frozenset({"initial_context_length"}),
    ),
    "gpt2": Architecture(
        attention="GPT2Attention",
        names={"hidden_size": "n_embd", "num_attention_heads": "n_head"}
        | {"num_hidden_layers": "n_layer", "max_position_embeddings": "n_positions"},
        defaults={"n_positions": 1024, "max_position_embeddings": 1024, "scale_attn_weights": True},
        bias=always(QKVO),
        rotates=differences.not_rotated,
        kv_heads=lambda keys: keys.heads("num_attention_heads"),
        causal=differences.no_cross,
        numbered=lambda keys: keys.flag("scale_attn_by_inverse_layer_idx"),
        scale=differences.gpt2_scale,
        ignored=frozenset({"reorder_and_upcast_attn"}),
    ),
    "gpt_neox": Architecture(
        attention="GPTNeoXAttention",
        names={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        defaults=_defaults(2048, attention_bias=True, partial_rotary_factor=0.25),
        kv_heads=lambda keys: keys.heads("num_attention_heads"),
    ),
    "falcon": Architecture(
        attention="FalconAttention",
        names={"num_key_value_heads": "num_kv_heads"},
        defaults=_defaults(2048, multi_query=True),
        kv_heads=differences.falcon_heads,
        bias=lambda keys: QKVO if keys.flag("bias") else (),
        rotates=lambda keys, kinds: [not keys.flag("alibi")] * len(kinds),
        remarks=differences.falcon_remarks,
        ignored=frozenset({"parallel_attn", "num_ln_in_parallel_attn"}),
    ),
    "bert": Architecture(attention="BertSelfAttention", defaults=_defaults(512), **_ENCODER),
    "roberta": Architecture(attention="RobertaSelfAttention", defaults=_defaults(512), **_ENCODER),
    "vit": Architecture(
        attention="ViTAttention",
        defaults={"qkv_bias": True},
        **_ENCODER
        | {"causal": always(False)}
        | {"bias": lambda keys: QKVO if keys.flag("qkv_bias") else ("o_proj",)},
    ),
    "deepseek_v2": Architecture(
        attention="DeepseekV2Attention",
        defaults=_defaults(2048, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128)
        | {"qk_rope_head_dim": 64, "v_head_dim": 128},
        pairing=_PAIRS,
        **_LATENT,
    ),
    "deepseek_v3": Architecture(
        attention="DeepseekV3Attention",
        defaults=_defaults(4096, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128)
        | {"qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True},
        pairing=differences.pairs_if_interleaved,
        **_LATENT,
    ),
    "minicpm3": Architecture(
        attention="MiniCPM3Attention",
        defaults=_defaults(32768, kv_lora_rank=256, q_lora_rank=768, qk_nope_head_dim=64)
        | {"qk_rope_head_dim": 32},
        **_LATENT,
    ),
    "llama4_text": Architecture(
        attention="Llama4TextAttention",
        defaults=_defaults(131072, 5e5, num_key_value_heads=8, head_dim=128)
        | {"use_qk_norm": True, "no_rope_layer_interval": 4, "attention_chunk_size": 8192}
        | {"attn_temperature_tuning": True},
        sizes=_sizes(5120, 48, 40),
        builders={FULL: plain_layer, CHUNKED: plain_layer},
        kinds=differences.llama4_kinds,
        typed=True,
        rotates=lambda keys, kinds: differences.roped(keys, len(kinds)),
        pairing=_PAIRS,
        unsupported=differences.llama4_unsupported,
        ignored=frozenset({"attn_scale", "cache_implementation"}),
    ),
    "cohere": Architecture(
        attention="CohereAttention",
        defaults=_defaults(8192, 5e5),
        qk_norm=lambda keys: "width" if keys.flag("use_qk_norm") else None,
        pairing=_PAIRS,
        unsupported=differences.cohere_norm,
    ),
    "cohere2": Architecture(
        attention="Cohere2Attention",
        defaults=_defaults(8192, sliding_window=4096, sliding_window_pattern=4),
        builders=ALL,
        kinds=every("sliding_window_pattern", SLIDING),
        typed=True,
        rotates=lambda keys, kinds: [kind == SLIDING for kind in kinds],
        pairing=_PAIRS,
        ignored=frozenset({"order_of_interleaved_layers", "position_embedding_type"})
        | {"rotary_pct", "use_embedding_sharing"},
    ),
    "granite": Architecture(
        attention="GraniteAttention",
        defaults=_defaults(2048, attention_multiplier=1.0),
        scale=lambda keys, head_dim, place: keys.number("attention_multiplier"),
    ),
    "glm4": Architecture(
        attention="Glm4Attention",
        defaults=_defaults(131072, num_key_value_heads=2, head_dim=128, attention_bias=True)
        | {"partial_rotary_factor": 0.5},
        bias=lambda keys: QKV if keys.flag("attention_bias") else (),
        pairing=_PAIRS,
    ),
    "jamba": Architecture(
        attention="JambaAttention",
        defaults={"max_position_embeddings": 262144, "num_key_value_heads": 8}
        | {"attn_layer_period": 8, "attn_layer_offset": 4}
        | {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
        builders={FULL: plain_layer, LINEAR: mamba_layer},
        kinds=differences.jamba_kinds,
        rotates=differences.not_rotated,
        ignored=frozenset({"mamba_conv_bias", "mamba_dt_rank", "mamba_inner_layernorms"})
        | {"mamba_proj_bias", "use_mamba_kernels"},
        **_NO_BIAS,
    ),
}
# models of several parts, by the model_type of the part that writes text
NESTED = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "llama4": "llama4_text",
    "llava": "llama",
    "mistral3": "mistral",
}
