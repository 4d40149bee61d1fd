"""Tiny checkpoints on disk, for loading and for spoiling."""

import gguf
import numpy as np
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
BOTH = {
    "vocab_size": 61,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
VISION = {**SIZES, "num_attention_heads": 3, "image_size": 16, "patch_size": 8}
VISION.pop("vocab_size")
T5 = {"vocab_size": 61, "d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 3}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
KINDS = {
    "llama": ("LlamaForCausalLM", DECODER),
    "llama, tied": ("LlamaForCausalLM", {**DECODER, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 4}),
    "gpt-oss": ("GptOssForCausalLM", {**DECODER, "num_local_experts": 4, "rope_parameters": ROPE}),
    "gemma 2": ("Gemma2ForCausalLM", DECODER),
    "bert": ("BertModel", SIZES),
    "t5": ("T5ForConditionalGeneration", T5),
    "whisper": ("WhisperForConditionalGeneration", BOTH),
    "vit": ("ViTModel", VISION),
    "deepseek v3": (
        "DeepseekV3ForCausalLM",
        {**DECODER, "head_dim": 4, "num_key_value_heads": 4, **LATENT},
    ),
}


def tiny(kind: str):
    """A small random model in eval mode."""
    torch.manual_seed(0)
    name, sizes = KINDS[kind]
    made_by = getattr(transformers, name)
    return made_by(made_by.config_class(**sizes)).eval()


LETTERS = "etaoinshrdlu"


def add_words(writer, count: int) -> None:
    """A byte-level vocabulary of so many words, most of them made by merges, and an end of text."""
    singles = list(bytes_to_unicode().values())
    merged = [first + second for first in LETTERS for second in singles]
    merged += [first + pair for first in LETTERS for pair in merged]
    made = merged[: count - len(singles) - 1]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*singles, *made, "<|end|>"])
    writer.add_token_types([1] * (count - 1) + [3])
    writer.add_token_merges([f"{word[0]} {word[1:]}" for word in made])
    writer.add_bos_token_id(count - 1)
    writer.add_eos_token_id(count - 1)


def write_gguf(path, words: int = 0, kind=np.float32) -> np.ndarray:
    """A Llama of one layer, with a tokenizer of so many words if there are any; its embedding."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(words or 16)
    writer.add_array("general.languages", ["en", "de"])
    if words:
        add_words(writer, words)
    shapes = {"token_embd": (words or 16, 32), "output_norm": (32,)}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    for name in ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}"] = (32, 32)
    numbers = np.random.default_rng(0)
    tensors = {
        name: numbers.standard_normal(shape).astype(kind if len(shape) > 1 else np.float32)
        for name, shape in shapes.items()
    }
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors["token_embd"]
