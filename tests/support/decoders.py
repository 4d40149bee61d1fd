"""Small decoders of the form that runs few tokens by compiled code, and what they compute."""

import torch
import transformers
from torch import nn
from transformers import DynamicCache

import regard.hf
from regard.hf.running.binding import is_bound

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
         "num_hidden_layers": 2, "intermediate_size": 96, "head_dim": 16}  # fmt: skip
MODELS = {
    "Llama": {},
    "Llama with biases": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 4},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma": {},
    "SmolLM3": {"no_rope_layers": [1, 0], "pad_token_id": 0},
}
PROMPT, STEPS = 5, 4
STEPPED = {*MODELS} - {"Mistral", "SmolLM3"}  # the others' attention repeats no step
TOKENS = torch.arange(3, 3 + 3 * (PROMPT + STEPS)).view(3, -1)


def model_of(name, **changed):
    kind = name.partition(" ")[0]
    config = getattr(transformers, f"{kind}Config")(**SIZES | MODELS[name] | changed)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # norms and biases are no longer ones and zeros
        nn.init.normal_(parameter, std=0.1, mean=float(parameter.dim() == 1))
    return model


def cache_for(model):
    """Of regard, which repeats steps, where it is installed; else of transformers."""
    installed = any(is_bound(each) for each in model.modules())
    return regard.hf.cache(model) if installed else DynamicCache(config=model.config)


@torch.no_grad()
def logits_of(model, cache=None, batch=1, **given):
    """Of a prompt, and of one token after the other."""
    cache = cache_for(model) if cache is None else cache
    parts = [TOKENS[:batch, :PROMPT], *TOKENS[:batch, PROMPT:].split(1, dim=1)]
    return torch.cat([model(x, past_key_values=cache, **given).logits for x in parts], dim=1)


def assert_same(found, wanted):
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
