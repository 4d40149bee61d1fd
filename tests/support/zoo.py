"""A tiny random model of every family, with every switch of that family turned on somewhere."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as t

VOCABULARY = 61
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    **SPECIAL,
}
HEADS_OF_8 = {**DECODER, "head_dim": 8}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_QUERIES = {**YARN, "rope_theta": 100.0, "llama_4_scaling_beta": 0.5}
LONG_QUERIES["original_max_position_embeddings"] = 4
GEMMA4 = {
    **HEADS_OF_8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCABULARY,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 256,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 4,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    **SPECIAL,
}
FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    **SPECIAL,
}
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
PAIR = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    **SPECIAL,
}
LATENT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "max_position_embeddings": 256,
    **SPECIAL,
}


@dataclass(frozen=True)
class Kind:
    """How a tiny model is built, and what it is fed."""

    model: str
    config: str
    options: dict[str, Any]
    fed: str = "decoder"  # or "encoder", "images", "pair", "speech"

    @property
    def is_here(self) -> bool:
        """Whether the installed transformers has the model: the oldest supported may not."""
        return hasattr(t, self.config)

    def build(self, implementation: str | None = None) -> Any:
        """The model, in eval mode and float32, its weights large enough for attention to matter."""
        if not self.is_here:
            pytest.skip(f"transformers {t.__version__} has no {self.config}")
        torch.manual_seed(0)
        config = getattr(t, self.config)(**copy.deepcopy(self.options))
        capped = self.model.startswith("Gemma2")  # old versions dropped its softcap under sdpa
        if implementation or capped:
            config._attn_implementation = implementation or "eager"
        model = getattr(t, self.model)(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                small = parameter.dim() < 2 or "norm" in name or name.endswith("bias")
                if small:
                    parameter.add_(0.3 * torch.randn_like(parameter))
                else:
                    parameter.copy_(0.3 * torch.randn_like(parameter))
        return model


def _lm(prefix: str, options: dict[str, Any], **more: Any) -> Kind:
    return Kind(f"{prefix}ForCausalLM", f"{prefix}Config", {**options, **more})


ZOO = {
    "llama": _lm("Llama", HEADS_OF_8, attention_bias=True),
    "llama llama3": _lm("Llama", DECODER, rope_parameters={**LLAMA3, "rope_theta": 500.0}),
    "llama MHA": _lm("Llama", DECODER, num_key_value_heads=4, tie_word_embeddings=True),
    "llama MQA": _lm("Llama", DECODER, num_key_value_heads=1),
    "mistral": _lm("Mistral", DECODER, sliding_window=5),
    "mixtral": _lm("Mixtral", DECODER, sliding_window=5, **EXPERTS),
    "qwen2": _lm("Qwen2", DECODER, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": _lm("Qwen3", HEADS_OF_8, attention_bias=True),
    "phi3": _lm(
        "Phi3",
        DECODER,
        sliding_window=7,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.67,
        },
    ),
    "gemma": _lm("Gemma", HEADS_OF_8, num_key_value_heads=1),
    "gemma2": _lm(
        "Gemma2",
        HEADS_OF_8,
        sliding_window=5,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=13,
    ),
    "gemma3": Kind(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**HEADS_OF_8, "sliding_window": 5, "layer_types": ALTERNATING},
    ),
    "smollm3": _lm(
        "SmolLM3",
        DECODER,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=5,
        layer_types=ALTERNATING,
    ),
    "olmo": _lm("Olmo", DECODER, clip_qkv=0.7),
    "olmo2": _lm("Olmo2", DECODER, attention_bias=True),
    "starcoder2": _lm("Starcoder2", DECODER, sliding_window=6, residual_dropout=0.0),
    "gpt-oss": _lm("GptOss", HEADS_OF_8, sliding_window=5, layer_types=ALTERNATING, **EXPERTS),
    "gpt2": Kind(
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT2, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ),
    "gpt-neox": _lm(
        "GPTNeoX",
        DECODER,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.34,
        },
    ),
    "falcon": _lm("Falcon", FALCON, bias=True),
    "falcon alibi": _lm("Falcon", FALCON, alibi=True, multi_query=False),
    "falcon groups": _lm("Falcon", FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "deepseek-v2": _lm("DeepseekV2", LATENT, attention_bias=True, topk_method="greedy"),
    "deepseek-v3": _lm(
        "DeepseekV3",
        LATENT,
        attention_bias=True,
        rope_parameters={**YARN, "rope_theta": 100.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek-v3 halves": _lm("DeepseekV3", {**LATENT, "q_lora_rank": None}, rope_interleave=False),
    "kimi-linear": _lm("KimiLinear", LATENT, layer_types=["full_attention"] * 3, num_experts=4),
    "axk1": _lm("AXK1", LATENT, rope_interleave=False),
    "minicpm3": _lm("MiniCPM3", LATENT),
    "mistral4": _lm("Mistral4", LATENT, rope_parameters=LONG_QUERIES),
    "bailing": _lm("BailingHybrid", LATENT, layer_types=["full_attention"] * 3, num_experts=4),
    "ministral3": _lm("Ministral3", HEADS_OF_8, sliding_window=9, rope_parameters=LONG_QUERIES),
    "llama4": Kind(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **HEADS_OF_8,
            **EXPERTS,
            "intermediate_size_mlp": 32,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 7,
            "floor_scale": 3,
        },
    ),
    "gemma3n": Kind(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {
            **GEMMA4,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [32] * 4,
            "laurel_rank": 4,
        },
    ),
    "gemma4": Kind("Gemma4ForCausalLM", "Gemma4TextConfig", {**GEMMA4, "global_head_dim": 16}),
    "gemma4 unified": Kind(
        "Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextConfig", {**GEMMA4, "global_head_dim": 16}
    ),
    "gemma4 tied": Kind(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
    ),
    "bert": Kind("BertModel", "BertConfig", ENCODER, "encoder"),
    "bert decoder": Kind(
        "BertLMHeadModel", "BertConfig", {**ENCODER, "is_decoder": True, **SPECIAL}
    ),
    "roberta": Kind("RobertaModel", "RobertaConfig", ENCODER, "encoder"),
    "vit": Kind(
        "ViTModel",
        "ViTConfig",
        {**ENCODER, "image_size": 12, "patch_size": 4, "qkv_bias": False},
        "images",
    ),
    "bart": Kind(
        "BartForConditionalGeneration",
        "BartConfig",
        {**PAIR, "decoder_start_token_id": 2, "forced_eos_token_id": None},
        "pair",
    ),
    "t5": Kind(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 24,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 12,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
        },
        "pair",
    ),
    "whisper": Kind(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **PAIR,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 96,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        "speech",
    ),
}
SPOKEN = [  # those whose positions are an argument
    name for name, kind in ZOO.items() if kind.fed == "decoder" and name != "falcon alibi"
]
DECODERS = [name for name, kind in ZOO.items() if kind.fed == "decoder"]
WRITERS = [name for name, kind in ZOO.items() if kind.fed in ("decoder", "pair", "speech")]


def tokens(batch: int, length: int) -> torch.Tensor:
    """Random tokens, none of them special."""
    generator = torch.Generator().manual_seed(100 * batch + length)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def _random(*shape: int) -> torch.Tensor:
    """The same values in every process, however often it drew before."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def inputs(name: str, *, batch: int = 2, length: int = 13, padding: str = "") -> dict[str, Any]:
    """What a model of the zoo is fed; `padding` is "", "left" or "right", for all rows but one."""
    fed = ZOO[name].fed
    if fed == "images":
        return {"pixel_values": _random(batch, 3, 12, 12)}
    if fed == "speech":
        features = _random(batch, 8, 20)
        return {"input_features": features, "decoder_input_ids": tokens(batch, length)}
    ids = tokens(batch, length)
    mask = torch.ones_like(ids)
    for row in range(1, batch if padding else 0):
        hidden = slice(0, row + 2) if padding == "left" else slice(length - row - 2, length)
        mask[row, hidden] = 0
    ids = ids.masked_fill(mask == 0, 0)
    fields = {"input_ids": ids, "attention_mask": mask}
    if fed == "pair":
        fields["decoder_input_ids"] = tokens(batch, 9)
    return fields


def result(output: Any) -> torch.Tensor:
    """Logits, or the last hidden state where there is no head."""
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits
