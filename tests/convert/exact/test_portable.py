"""A stock deepseek_v3 checkpoint computes the same as the layers, in a process without regard."""

import json
import math
import subprocess
import sys

import pytest
import torch

from joined import joined, random_mla
from regard import Causal, MultiHeadLatentAttention, PositionScale, Rotary, SlidingWindow
from regard.convert.exact.portable import to_deepseek_v3
from regard.hf import attention_modules, attention_of
from regard.hf.placing.place import place
from regard.rope.scaling import NTK, Frequencies, LinearScaling
from tiny import SIZES, tiny, tokens

CLOSE = {"atol": 5e-5, "rtol": 5e-5}
UNMODIFIED = """
import json, sys, torch
from transformers import AutoModelForCausalLM
ids, out = torch.tensor(json.loads(sys.argv[1])), {}
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "DeepseekV3ForCausalLM" and "regard" not in sys.modules
    with torch.no_grad():
        out[folder + " logits"] = model(ids).logits
    text = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None)
    out[folder + " text"] = text
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    out[folder + " tied"] = torch.tensor(tied)
torch.save(out, "out")
"""


def full(family):
    """A tiny model without biases on its queries, and without windows."""
    model = tiny(family)
    model.config.sliding_window = None
    for module in attention_modules(model).values():
        if hasattr(module, "sliding_window"):
            module.sliding_window = None
        module.q_proj.bias = None
    model.generation_config.eos_token_id = None
    return model


def layers_of(model):
    return [attention_of(module) for module in attention_modules(model).values()]


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def write(model, ids):
    return model.generate(ids, max_new_tokens=10, do_sample=False)


@pytest.mark.parametrize("family", ["llama", "llama 3 rope", "mistral", "qwen2"])
def test_exact_layers_give_the_model_s_own_logits(family):
    model, ids = full(family), tokens(2, 20)
    made = to_deepseek_v3(model, [joined(layer) for layer in layers_of(model)])
    torch.testing.assert_close(logits(made, ids), logits(model, ids), **CLOSE)
    assert write(made, ids).equal(write(model, ids))


def test_unmodified_transformers_loads_it(tmp_path):
    ids, wanted = tokens(2, 12), {}
    for tied, pairing in ((False, "halves"), (True, "halves"), (False, "pairs")):
        model, folder = full("llama"), str(tmp_path / f"{tied} {pairing}")
        if tied:
            model.config.tie_word_embeddings = True
            model.lm_head.weight = model.model.embed_tokens.weight
        layers = random_mla(model, pairing=pairing)
        to_deepseek_v3(model, layers).save_pretrained(folder)
        place(model, layers)
        wanted[folder] = logits(model, ids), write(model, ids), tied
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["model_type"] == "deepseek_v3"
        assert not config.get("auto_map")
    code = [sys.executable, "-c", UNMODIFIED, json.dumps(ids.tolist()), *wanted]
    subprocess.run(code, check=True, capture_output=True, cwd=tmp_path)
    theirs = torch.load(tmp_path / "out", weights_only=True)
    for folder, (numbers, text, tied) in wanted.items():
        torch.testing.assert_close(theirs[f"{folder} logits"], numbers, **CLOSE)
        assert theirs[f"{folder} text"].equal(text)
        assert bool(theirs[f"{folder} tied"]) == tied


@pytest.mark.parametrize("bias", [{"kv_b_proj"}, {"kv_b_proj", "kv_a_proj_with_mqa"}, set()])
def test_every_bias_but_that_of_the_queries_is_represented(bias):
    model, ids = full("llama"), tokens(2, 12)
    layers = [mla(bias=bias) for _ in range(2)]
    made = to_deepseek_v3(model, layers)
    torch.testing.assert_close(logits(made, ids), logits(place(model, layers), ids), **CLOSE)
    held = made.model.layers[0].self_attn.kv_a_layernorm.weight
    assert held[-1] == ("kv_b_proj" in bias)  # else nothing but the latent is cached


@pytest.mark.parametrize("constant", [2.0**15, 2.0**24])
def test_the_norm_of_the_latent_divides_by_a_constant(constant):
    """The error is at most |latent|^2 / (2 * constant^2), a share of the latent."""
    model = full("llama")
    layers = random_mla(model)
    made = to_deepseek_v3(model.double(), [layer.double() for layer in layers], constant=constant)
    x = 10 * torch.randn(1, 50, 24, dtype=torch.float64)
    latent = layers[0].kv_a_proj_with_mqa(x)[..., :10]
    attention = made.model.layers[0].self_attn
    joint = attention.kv_a_proj_with_mqa(x)[..., :11].float()
    rebuilt = attention.kv_b_proj(attention.kv_a_layernorm(joint).double())
    wanted = layers[0].kv_b_proj(latent)
    bound = latent.square().sum(-1).max() / (2 * constant**2) + 1e-6
    assert (rebuilt - wanted).norm() <= bound * wanted.norm()


def test_in_bfloat16_its_error_is_that_of_the_layers():
    model, ids = full("llama"), tokens(4, 40)
    layers = random_mla(model)
    exact = logits(place(model, layers), ids)
    half = model.bfloat16()
    ours = logits(half, ids).float()
    theirs = logits(to_deepseek_v3(half, layers), ids).float()
    own, other = ((each - exact).square().mean().sqrt() for each in (ours, theirs))
    assert own > 1e-3
    assert other < 1.5 * own


def test_a_frequency_of_zero_does_not_rotate():
    model, ids = full("llama"), tokens(1, 30)
    layers = [mla(rope=Rotary(4, scaling=Frequencies((0.0, 0.5)))) for _ in range(2)]
    made = to_deepseek_v3(model, layers)
    factors = made.config.rope_parameters["long_factor"]
    assert all(map(math.isfinite, factors))  # JSON has no infinity
    torch.testing.assert_close(logits(made, ids), logits(place(model, layers), ids), **CLOSE)


def mla(hidden_size=24, num_heads=4, **options):
    given = {
        "kv_lora_rank": 9,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "latent_norm": False,
        "rope": Rotary(4, theta=100.0),
        "mask": Causal(),
    }
    torch.manual_seed(3)
    layer = MultiHeadLatentAttention(hidden_size, num_heads, **(given | options))
    return layer.requires_grad_(False).eval()


REFUSED = {
    "query biases": ({"bias": {"q_proj"}}, "its queries have a bias, and q_proj has none"),
    "a query latent": ({"q_lora_rank": 3}, "its queries have a latent; give q_lora_rank=None"),
    "a norm": ({"latent_norm": True}, "its latent is normed"),
    "a window": ({"mask": Causal() & SlidingWindow(3)}, r"its mask is Causal\(\) & SlidingWindow"),
    "another rank": ({"kv_lora_rank": 8}, "kv_lora_rank is 8, in layer 0 9"),
    "another value size": ({"v_head_dim": 4}, "v_head_dim is 4, in layer 0 5"),
    "other frequencies": ({"rope": Rotary(4, theta=99.0)}, "frequencies are not those of layer 0"),
    "another pairing": ({"rope": Rotary(4, theta=100.0, pairing="pairs")}, "not those of layer 0"),
    "sinks": ({"sinks": True}, "it has sinks"),
    "a gate": ({"gate": "head"}, "it has gate_proj"),
    "scaled queries": (
        {"query_scale": PositionScale(0.1, 9)},
        r"its queries are scaled by PositionScale\(0.1, 9\)",
    ),
    "frequencies that change": ({"rope": Rotary(4, scaling=NTK(2, 64))}, "no fixed frequencies"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_represented_are_refused(name):
    options, message = REFUSED[name]
    with pytest.raises(
        ValueError, match=f"deepseek_v3 checkpoint cannot hold layer 1: .*{message}"
    ):
        to_deepseek_v3(full("llama"), [mla(), mla(**options)])


def test_unsupported_features_of_all_layers_are_refused():
    backwards = Rotary(4, scaling=Frequencies((1.0, -0.5)))
    with pytest.raises(ValueError, match="layer 0: its rope scales queries and keys"):
        to_deepseek_v3(full("llama"), [mla(rope=backwards)] * 2)
    made = to_deepseek_v3(full("llama"), [mla(rope=Rotary(4, scaling=LinearScaling(3)))] * 2)
    assert made.config.rope_parameters["long_factor"] == pytest.approx([3.0, 300.0])


@pytest.mark.usefixtures("unchecked")
def test_other_models_are_refused():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    gemma = Gemma2ForCausalLM(Gemma2Config(**SIZES))
    with pytest.raises(ValueError, match="Gemma2ForCausalLM is not one of llama, mistral"):
        to_deepseek_v3(gemma, [mla()] * 2)
    with pytest.raises(ValueError, match="the model has 2 layers, got 1"):
        to_deepseek_v3(full("llama"), [mla()])
    with pytest.raises(ValueError, match="layer 0: it is Attention, not MultiHeadLatentAttention"):
        to_deepseek_v3(full("llama"), layers_of(full("llama")))
