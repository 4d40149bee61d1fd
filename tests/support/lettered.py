"""A tiny model on disk whose tokens are single characters."""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = {chr(48 + at): at for at in range(80)}


def write_lettered(path: Path, words: Mapping[str, int] = LETTERS, layers: int = 1) -> Path:
    """A Llama of such words, which reads a text letter by letter; the first is the unknown one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(
        **sizes, num_hidden_layers=layers, vocab_size=len(words), eos_token_id=None
    )
    LlamaForCausalLM(config).save_pretrained(path)
    letters = Tokenizer(models.WordLevel(dict(words), unk_token=next(iter(words))))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(path)
    return path
