"""Layers that transformers builds: every shape against the module itself, on the meta device.

Its weights, its window, its factor of scores and its frequencies; then what a description says
besides, and sizes that are refused before anything is built.
"""

import inspect
import math
import time
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import regard
from architectures import CASES, DELTA, EXPERTS, WIDE, attentions, built, entries
from covering import few
from published_configs import PUBLISHED
from regard.hf.loading.untrusted import CheckpointError
from regard.plan import building
from regard.plan.building import describe_config
from regard.plan.describing import describe
from regard.plan.shapes import LayerShape, ModelShape, Workload
from regard.plan.weights import parameters

FILE = Path("config.json")


def described(config: dict[str, Any]) -> ModelShape:
    return describe_config(config, FILE, "small", None)


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
def test_shapes_are_those_of_the_modules(number: int) -> None:
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


@pytest.mark.parametrize("number", few(range(len(CASES)), 2), ids=lambda at: f"{CASES[at][0]}-{at}")
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


@pytest.mark.parametrize("number", few(range(len(CASES)), 2), ids=lambda at: f"{CASES[at][0]}-{at}")
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


@pytest.mark.parametrize("kind", ["DeepseekV2Config", "DeepseekV3Config", "MiniCPM3Config"])
def test_what_transformers_writes_of_latent_models_is_read(kind, tmp_path):
    """Its files repeat sums of sizes, as `qk_head_dim`."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    getattr(transformers, kind)().save_pretrained(tmp_path)
    assert {layer.kind for layer in describe(tmp_path).layers} == {"MLA"}


@pytest.mark.parametrize(
    "config",
    [
        entries("qwen3_next", WIDE | EXPERTS | DELTA | {"head_dim": 16}),
        entries(
            "jamba",
            {"num_key_value_heads": 2, "attn_layer_period": 3, "attn_layer_offset": 1}
            | EXPERTS
            | {
                "mamba_d_state": 5,
                "mamba_d_conv": 3,
                "mamba_expand": 2,
                "use_mamba_kernels": False,
            },
        ),
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_states_are_as_large_as_those_of_transformers(config: dict[str, object]) -> None:
    given = {name: value for name, value in config.items() if name != "model_type"}
    model = AutoModel.from_config(CONFIG_MAPPING[str(config["model_type"])].from_dict(given))
    with torch.no_grad():
        cache = model(torch.ones(1, 4, dtype=torch.long), use_cache=True).past_key_values
    shape = describe_config(config, FILE, "small", None)
    for layer, held in zip(shape.layers, cache.layers, strict=True):
        if layer.kind == "linear":
            states = [*held.conv_states.values(), *held.recurrent_states.values()]
            assert layer.state_elements == sum(state.numel() for state in states)
        else:
            assert held.keys.shape[1:] == (layer.num_kv_heads, 4, layer.head_dim)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "torch.float32", "torch_dtype": "bfloat16"}, "float32"),
        ({}, "float32"),
        ({"torch_dtype": "auto"}, "float32"),
    ],
)
def test_dtype(given: dict[str, Any], expected: str) -> None:
    config = {k: v for k, v in PUBLISHED["Qwen3-0.6B"].items() if k != "torch_dtype"}
    model = described(config | given)
    assert model.dtype == expected
    unnamed = given.get("torch_dtype") == "auto" or not given
    assert any("names no dtype" in remark for remark in model.remarks) == unnamed


def test_parts_of_a_model() -> None:
    model = described(PUBLISHED["gemma-3-4b"])
    assert (model.architecture, len(model.layers), model.dtype) == ("gemma3", 34, "bfloat16")
    assert any("leaves out num_attention_heads" in remark for remark in model.remarks)
    assert any("Only the part that writes text" in remark for remark in model.remarks)
    alone = described(PUBLISHED["gemma-3-4b"]["text_config"] | {"num_attention_heads": 8})
    assert alone.layers == model.layers
    with pytest.raises(CheckpointError, match="'num_attention_heads' must be a whole number"):
        described(PUBLISHED["gemma-3-4b"]["text_config"])


@pytest.mark.parametrize("outer", ["gemma3", "gemma3n", "llama4", "llava", "mistral3"])
def test_the_text_part_is_found(outer: str) -> None:
    inner_type = {"gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "llama4": "llama4_text"}
    inner = {"model_type": inner_type.get(outer, "llama" if outer == "llava" else "mistral")}
    inner |= {"hidden_size": 64, "num_hidden_layers": 10, "num_attention_heads": 8}
    inner |= {"num_key_value_heads": 2, "head_dim": 8}
    inner |= {"num_kv_shared_layers": 2} if outer == "gemma3n" else {}
    model = described({"model_type": outer, "text_config": inner})
    assert model.layers == described(inner).layers and len(model.layers) == 10


def test_quantised_weights_are_told() -> None:
    remarks = described(PUBLISHED["gpt-oss-20b"]).remarks
    assert any(remark.startswith("Weights are quantised") for remark in remarks)


def test_entries_that_transformers_does_not_read_are_told() -> None:
    config = PUBLISHED["Llama-3.1-8B"] | {"sliding_window": 512, "kv_sharing_period": 2}
    told = [each for each in described(config).remarks if "does not read" in each]
    assert told == [
        "transformers does not read kv_sharing_period, sliding_window of this architecture."
    ]
    assert described(config).layers == described(PUBLISHED["Llama-3.1-8B"]).layers


def test_what_install_runs_is_what_the_remark_says() -> None:
    for config, runs in ((entries("llama", {}), True), (entries("granite", {}), False)):
        remarks = described(config).remarks
        assert any("regard.hf.install runs it" in remark for remark in remarks) == runs


@pytest.mark.parametrize(
    ("model_type", "sizes", "kinds"),
    [
        ("mamba", {"state_size": 4, "expand": 2}, {"linear"}),
        ("mamba2", {"num_heads": 8, "head_dim": 12, "state_size": 4, "expand": 2}, {"linear"}),
        ("olmo_hybrid", {"num_attention_heads": 6}, {"linear", "MHA"}),
        ("opt", {"num_attention_heads": 6, "ffn_dim": 32, "word_embed_proj_dim": 48}, {"MHA"}),
        ("deepseek_v32", {"num_attention_heads": 6, "n_routed_experts": 8}, {"MLA"}),
    ],
)
def test_models_that_regard_does_not_run_are_described(
    model_type: str, sizes: dict[str, Any], kinds: set[str]
) -> None:
    given = {"model_type": model_type, "hidden_size": 48, "num_hidden_layers": 4, "vocab_size": 32}
    model = described(given | {"pad_token_id": 0} | sizes)
    assert {layer.kind for layer in model.layers} == kinds
    assert any(layer.unsupported for layer in model.layers) == (model_type != "opt")


NORMED = {  # names and kinds of norms of queries, and the sizes of a layer
    "persimmon": ({"qk_layernorm": True}, 4 * 32 * 32 + 4 * 32 + 4 * 8),
    "phi": ({"qk_layernorm": True}, 3 * 32 * 32 + 3 * 32 + 4 * 8),
    "lfm2": ({"layer_types": ["full_attention"] * 2}, 3 * 32 * 32 + 2 * 8),
    "hunyuan_v1_dense": ({"head_dim": 8}, 3 * 32 * 32 + 2 * 8),
    "stablelm": ({"qk_layernorm": True}, 3 * 32 * 32 + 6 * 8),
}


@pytest.mark.parametrize("model_type", NORMED)
def test_parameters_are_those_of_the_module_whatever_its_norms_are(model_type: str) -> None:
    more, count = NORMED[model_type]
    given = {"model_type": model_type, "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    layer = described(given | heads | {"pad_token_id": 0} | more).layers[0]
    assert parameters(layer, Workload(context=1)) == count
    assert layer.qk_norm == (None if model_type == "stablelm" else "head")
    assert bool(layer.unsupported) == (model_type != "lfm2")


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"num_hidden_layers": 10_000}, "'num_hidden_layers' must be a whole number of 1 to 512"),
        ({"hidden_size": 1 << 40}, "'hidden_size' must be a whole number of 1 to 1048576"),
        ({"num_attention_heads": 1 << 20}, "not a multiple of the number of attention heads"),
        ({"num_hidden_layers": None}, "expected int, got NoneType"),
        ({"intermediate_size": 1 << 62}, "cannot be described"),
        ({"num_local_experts": 1 << 20, "model_type": "mixtral"}, None),
        ({"max_position_embeddings": 1 << 40}, "'max_position_embeddings' must be"),
        ({"num_labels": 1 << 20}, None),
    ],
)
def test_large_numbers_take_little_time_and_memory(changed: dict[str, Any], rule: Any) -> None:
    config = PUBLISHED["Llama-3.1-8B"] | changed
    described(PUBLISHED["Llama-3.1-8B"])  # imports
    tracemalloc.start()
    start = time.process_time()
    refusal = nullcontext() if rule is None else pytest.raises(CheckpointError, match=rule)
    with refusal:
        described(config)
    seconds, (_, most) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 20 and most < 64 << 20


def test_modules_are_counted_while_they_are_built() -> None:
    config = entries("llama", {"num_hidden_layers": 7})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(building, "PARTS", 50)
        with pytest.raises(CheckpointError, match="more than 50 modules and parameters"):
            described(config)
