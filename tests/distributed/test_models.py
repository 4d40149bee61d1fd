"""Which models are transformers' own."""

import torch
from transformers import LlamaConfig, LlamaModel

from regard import Attention
from regard.distributed.models import is_of_transformers


class Derived(LlamaModel):
    pass


def test_models_of_transformers():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, intermediate_size=8)
    with torch.device("meta"):
        model, derived = LlamaModel(config), Derived(config)
    assert is_of_transformers(model)
    assert is_of_transformers(derived)
    assert not is_of_transformers(model.layers[0])
    assert not is_of_transformers(torch.nn.Sequential(model))
    assert not is_of_transformers(Attention(8, 2))
    assert not is_of_transformers(config)
