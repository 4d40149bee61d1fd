"""Tiny random hybrid models: layers with recurrent or convolutional states beside attention."""

from functools import cache
from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": 1,
    "max_position_embeddings": 128,
}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
_DELTA |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 3}
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 3, "mamba_expand": 2}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_STATES, _KEYS = "linear_attention", "full_attention"
_ORDER = [_STATES, _KEYS, _STATES]

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3Next",
        {**_DELTA, "layer_types": _ORDER, "head_dim": 8, "num_experts": 0},
    ),
    "qwen3.5": ("Qwen3_5", {**_DELTA, "layer_types": _ORDER, "head_dim": 8}),
    "olmo-hybrid": ("OlmoHybrid", {**_DELTA, "layer_types": _ORDER}),
    "kimi-linear": (
        "KimiLinear",
        {
            "layer_types": _ORDER,
            "mlp_layer_types": ["dense"] * 3,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", _KEYS, "conv"], "block_multiple_of": 8}),
    "jamba": (
        "Jamba",
        {**_MAMBA, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 1},
    ),
    "granite": (
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            **_MAMBA2,
            "layer_types": _ORDER,
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
        },
    ),
    "falcon-h1": ("FalconH1", {**_MAMBA, **_MAMBA2, "mamba_d_ssm": 64, "head_dim": 8}),
    "nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": [_STATES, "mlp", _KEYS],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 8,
            "conv_kernel": 3,
            "chunk_size": 8,
            "head_dim": 8,
        },
    ),
}


@cache
def _weights(name: str) -> dict[str, torch.Tensor]:
    model = _empty(name)
    generator = torch.Generator().manual_seed(5)
    state = model.state_dict()
    return {
        key: value + 0.4 * torch.randn(value.shape, generator=generator)
        if value.ndim > 1
        else value
        for key, value in state.items()
    }


def _empty(name: str) -> Any:
    kind, options = HYBRIDS[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}{'Text' if name == 'qwen3.5' else ''}Config")
    return getattr(transformers, f"{kind}ForCausalLM")(config(**{**_SIZES, **options})).eval()


def hybrid(name: str) -> Any:
    """A new model of this kind, with the same weights at each call."""
    model = _empty(name)
    model.load_state_dict(_weights(name))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
