"""Every row of the table against the model that transformers builds from the same entries.

The oracle is the module itself, on the meta device: its weights, its window, its factor of scores
and its frequencies.
"""

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from architectures import CASES, attentions, built, entries
from regard.plan.configurations import CONFIGURATIONS
from regard.plan.configured import described_values
from regard.plan.describing import describe
from regard.plan.shapes import LayerShape, ModelShape

FILE = Path("config.json")


def described(config: dict[str, Any]) -> ModelShape:
    return described_values(config, FILE, "small", None)


def parameters_of(layer: LayerShape) -> int:
    """Counted here from the definition of each attention, and not by `regard.plan.cost`."""
    hidden, heads, kv_heads = layer.hidden_size, layer.num_heads, layer.num_kv_heads
    queries, values = heads * layer.head_dim, heads * layer.v_head_dim
    out = {"q_proj": (hidden, queries), "o_proj": (values, hidden)}
    if layer.kv_lora_rank is not None:
        latent = layer.kv_lora_rank
        unrotated = layer.head_dim - layer.qk_rope_head_dim
        out["kv_a_proj_with_mqa"] = (hidden, latent + layer.qk_rope_head_dim)
        out["kv_b_proj"] = (latent, heads * (unrotated + layer.v_head_dim))
        norms = latent + (layer.q_lora_rank or 0)
        if layer.q_lora_rank is not None:
            out["q_a_proj"] = (hidden, layer.q_lora_rank)
            out["q_b_proj"] = (layer.q_lora_rank, queries)
            del out["q_proj"]
    else:
        norms = {"head": layer.head_dim, "width": queries, None: 0}[layer.qk_norm]
        if layer.keys_of is None:
            out["k_proj"] = (hidden, kv_heads * layer.head_dim)
            out["v_proj"] = (hidden, kv_heads * layer.v_head_dim)
            norms += {"head": layer.head_dim, "width": out["k_proj"][1], None: 0}[layer.qk_norm]
    if layer.gate is not None:
        out["gate_proj"] = (hidden, queries if layer.gate == "channel" else heads)
    weights = sum(rows * columns for rows, columns in out.values())
    biases = sum(out[name][1] for name in layer.bias)
    return weights + biases + norms + (heads if layer.sinks else 0)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda at: f"{CASES[at][0]}-{at}")
def test_row_equals_the_model_that_transformers_builds(number: int) -> None:
    model_type, more = CASES[number]
    config = entries(model_type, more)
    shape, model = described(config), built(config)
    modules = attentions(model)
    assert len(shape.layers) == len(modules) == 7
    for layer, module in zip(shape.layers, modules, strict=True):
        if layer.kind == "linear":
            assert "Mamba" in type(module).__name__ or "Delta" in type(module).__name__
            continue
        held = sum(each.numel() for each in module.parameters())
        output_norm = sum(
            each.numel()
            for name, each in module.named_parameters()
            if "LayerNorm" in name and "output" in name  # of BERT, after the residual
        )
        assert parameters_of(layer) == held - output_norm
        inner = getattr(module, "self", module)
        assert layer.causal == inner.is_causal
        factor = getattr(inner, "inv_norm_factor", None) or inner.scaling
        expected = layer.scale
        if expected is None:
            rope = eval(layer.rope, vars(regard)) if layer.rope else regard.NO_ROPE
            expected = layer.head_dim**-0.5 * rope.softmax_factor
        assert math.isclose(factor, expected)
        assert layer.window == window_of(module, model.config)
        assert layer.softcap == getattr(module, "attn_logit_softcapping", None)
        assert layer.sinks == hasattr(module, "sinks")


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda at: f"{CASES[at][0]}-{at}")
def test_frequencies_are_those_of_the_rotary_module(number: int) -> None:
    model_type, more = CASES[number]
    config = entries(model_type, more)
    shape, model = described(config), built(config)
    if not any(layer.rope for layer in shape.layers):
        assert not hasattr(model, "rotary_emb") or getattr(model.config, "alibi", False)
        return
    rotary = type(model.rotary_emb)(config=model.config)  # on the CPU
    for at, layer in enumerate(shape.layers):
        if not layer.rope:
            continue
        kind = model.config.layer_types[at] if hasattr(rotary, "full_attention_inv_freq") else ""
        prefix = f"{kind}_" if kind else ""
        rope = eval(layer.rope, vars(regard))
        assert rope.dim == layer.qk_rope_head_dim
        ours = rope.angles(torch.tensor([1]))[0]
        torch.testing.assert_close(ours, getattr(rotary, f"{prefix}inv_freq"), rtol=1e-6, atol=0)
        assert math.isclose(rope.attention_factor, getattr(rotary, f"{prefix}attention_scaling"))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda at: f"{CASES[at][0]}-{at}")
def test_channels_are_paired_as_transformers_does(number: int) -> None:
    """The oracle is its code: neighbours are paired by complex numbers or by every second one."""
    model_type, more = CASES[number]
    config = entries(model_type, more)
    module = attentions(model := built(config))[0]
    functions = vars(inspect.getmodule(type(module)))
    rotating = [functions[name] for name in functions if "rotary" in name or "rotate_" in name]
    source = "".join(inspect.getsource(each) for each in rotating if inspect.isfunction(each))
    neighbours = "view_as_complex" in source or "::2]" in source
    if hasattr(model.config, "rope_interleave"):
        neighbours = model.config.rope_interleave
    for layer in described(config).layers:
        if layer.rope:
            assert ("pairing='pairs'" in layer.rope) == neighbours


def window_of(module: Any, config: Any) -> int | None:
    """From the module, or of models that have it in their configuration only, from that."""
    if hasattr(module, "sliding_window"):
        return module.sliding_window or None
    kind = (
        (getattr(config, "layer_types", None) or {module.layer_idx: ""})[module.layer_idx]
        if (hasattr(module, "layer_idx"))
        else ""
    )
    if kind in ("full_attention", "chunked_attention"):
        return None
    return getattr(config, "sliding_window", None)


def test_every_row_is_compared() -> None:
    assert {name for name, _ in CASES} == set(CONFIGURATIONS)


@pytest.mark.parametrize("kind", ["DeepseekV2Config", "DeepseekV3Config", "MiniCPM3Config"])
def test_what_transformers_writes_of_latent_models_is_read(kind, tmp_path):
    """Its files repeat sums of sizes, as `qk_head_dim`."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    getattr(transformers, kind)().save_pretrained(tmp_path)
    assert {layer.kind for layer in describe(tmp_path).layers} == {"MLA"}
