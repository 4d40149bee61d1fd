"""Small models of every architecture that regard.plan describes, as transformers builds them."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SMALL = {"hidden_size": 48, "num_hidden_layers": 7, "num_attention_heads": 6}
FEW = {"vocab_size": 32, "intermediate_size": 32, "pad_token_id": 0}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
EXPERTS |= {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
ROUTED = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
ROUTED |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
GQA = {"num_key_value_heads": 2}
WIDE = GQA | {"head_dim": 12}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
YARN |= {"mscale": 0.7, "mscale_all_dim": 0.9}
OLD_YARN = {"rope_scaling": {**YARN, "type": "yarn"}, "rope_theta": 500.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 128}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2, 3], "long_factor": [2.0, 3, 4, 9]}
MLA = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
USED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}
TYPED = {"layer_types": ["full_attention", "sliding_attention", "full_attention"] * 2}
TYPED["layer_types"].append("sliding_attention")
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6}
DELTA |= {"linear_value_head_dim": 10, "linear_conv_kernel_dim": 3}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", WIDE | {"attention_bias": True, "rope_scaling": LLAMA3, "rope_theta": 5e5}),
    ("llama", GQA | {"rope_parameters": LLAMA3 | {"rope_theta": 1e5}}),
    ("llama", GQA | {"rope_parameters": YARN | {"rope_theta": 1e5}}),
    ("llama", GQA | {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", GQA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("mistral", GQA | {"sliding_window": 9}),
    ("mistral", WIDE | {"sliding_window": None}),
    ("ministral", WIDE | {"sliding_window": 9} | TYPED),
    ("ministral", WIDE | {"sliding_window": 9}),
    ("mixtral", GQA | EXPERTS | {"sliding_window": 4}),
    ("qwen2", GQA),
    ("qwen2", GQA | USED),
    ("qwen2", GQA | USED | TYPED),
    ("qwen2_moe", GQA | EXPERTS),
    ("qwen2_moe", GQA | EXPERTS | USED | {"qkv_bias": False}),
    ("qwen3", WIDE),
    ("qwen3", WIDE | USED | {"attention_bias": True}),
    ("qwen3_moe", WIDE | EXPERTS),
    ("qwen3_moe", WIDE | EXPERTS | {"use_sliding_window": True, "sliding_window": 6}),
    ("qwen3_next", WIDE | {"head_dim": 16} | EXPERTS | DELTA),
    ("qwen3_next", WIDE | {"head_dim": 16} | EXPERTS | DELTA | {"full_attention_interval": 2}),
    ("phi3", GQA | {"sliding_window": 7}),
    ("phi3", {"sliding_window": None, "pad_token_id": 0, "partial_rotary_factor": 0.5}),
    ("phi3", {"rope_scaling": LONG, "pad_token_id": 0, "max_position_embeddings": 9999}),
    ("gemma", WIDE),
    ("gemma2", WIDE | {"sliding_window": 4, "query_pre_attn_scalar": 9}),
    ("gemma2", WIDE | {"sliding_window": 4, "attn_logit_softcapping": None} | TYPED),
    ("gemma3_text", WIDE | {"sliding_window": 4, "query_pre_attn_scalar": 12}),
    ("gemma3_text", WIDE | {"sliding_window": 4, "sliding_window_pattern": 3, "rope_theta": 99.0}),
    ("gemma3_text", WIDE | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    (
        "gemma3_text",
        WIDE
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 55.0},
            }
        },
    ),
    ("gemma3n_text", WIDE | {"num_kv_shared_layers": 2, "sliding_window": 4}),
    ("smollm3", GQA),
    ("smollm3", GQA | {"use_sliding_window": True, "sliding_window": 5}),
    ("smollm3", GQA | {"no_rope_layers": [1, 0, 0, 1, 1, 0, 1]}),
    ("olmo", GQA | {"clip_qkv": 3.0}),
    ("olmo2", GQA | {"attention_bias": True}),
    ("olmo3", GQA | {"sliding_window": 8}),
    ("starcoder2", GQA | {"sliding_window": 8}),
    ("starcoder2", GQA | {"use_bias": False}),
    ("gpt_oss", WIDE | EXPERTS | {"rope_scaling": YARN | {"truncate": False}}),
    ("gpt2", {}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 500}),
    ("gpt_neox", {"attention_bias": False}),
    ("falcon", {}),
    ("falcon", {"multi_query": False, "bias": True, "alibi": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 3}),
    ("bert", {}),
    ("bert", {"is_decoder": True}),
    ("roberta", {}),
    ("vit", {"image_size": 8, "patch_size": 4, "qkv_bias": False}),
    ("deepseek_v2", MLA | ROUTED | {"q_lora_rank": 12, "attention_bias": True} | OLD_YARN),
    ("deepseek_v2", MLA | ROUTED | {"q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", MLA | ROUTED | {"q_lora_rank": 12} | OLD_YARN),
    ("deepseek_v3", MLA | ROUTED | {"q_lora_rank": None, "rope_interleave": False}),
    ("minicpm3", MLA | {"q_lora_rank": 12}),
    ("minicpm3", MLA | {"q_lora_rank": 12, "v_head_dim": None}),
    ("llama4_text", WIDE | EXPERTS | {"attention_chunk_size": 6}),
    ("llama4_text", WIDE | EXPERTS | {"use_qk_norm": False, "attn_temperature_tuning": False}),
    ("cohere", GQA),
    ("cohere", GQA | {"use_qk_norm": True}),
    ("cohere2", GQA | {"sliding_window": 6}),
    ("cohere2", GQA | {"sliding_window": 6, "sliding_window_pattern": 2}),
    ("granite", GQA | {"attention_multiplier": 0.3}),
    ("glm4", WIDE),
    ("jamba", GQA | EXPERTS | {"attn_layer_period": 3, "attn_layer_offset": 1}),
]
NAMES = {
    "gpt2": {"hidden_size": "n_embd", "num_hidden_layers": "n_layer"}
    | {"num_attention_heads": "n_head"}
}


def entries(model_type: str, more: dict[str, Any]) -> dict[str, Any]:
    """The entries of a small model."""
    names = NAMES.get(model_type, {})
    return {"model_type": model_type} | {names.get(k, k): v for k, v in SMALL.items()} | FEW | more


def built(config: dict[str, Any]) -> Any:
    """transformers' model of the same entries, on the meta device."""
    given = copy.deepcopy({k: v for k, v in config.items() if k != "model_type"})
    made = CONFIG_MAPPING[config["model_type"]].from_dict(given)
    with torch.device("meta"):
        return AutoModel.from_config(made, attn_implementation="eager")


def attentions(model: Any) -> list[nn.Module]:
    """The attention of each layer, or what stands for it."""
    names = ("self_attn", "attn", "attention", "self_attention", "linear_attn", "mamba")
    found = []
    for layer in layers_of(model):
        module = next(getattr(layer, name) for name in names if hasattr(layer, name))
        found.append(module)
    return found


def layers_of(model: Any) -> Any:
    for path in ("layers", "h", "encoder.layer", "encoder.layers", "encoder.layers"):
        holder = model
        for name in path.split("."):
            holder = getattr(holder, name, None)
        if holder is not None:
            return holder
    raise AssertionError(type(model))
