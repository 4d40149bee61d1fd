"""What engines reserve: by hand, by their real cache objects, and by a model of their blocks."""

import random

import pytest
import torch

from regard.plan.engines import ENGINES, parts_of, reserved
from regard.plan.shapes import STORAGES, LayerShape

PLAIN = STORAGES["plain"]


def heads(num_kv_heads=8, head_dim=128, num_heads=32, v_head_dim=None, **more):
    return LayerShape(
        hidden_size=4096,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim or head_dim,
        **more,
    )


DEEPSEEK = heads(128, 192, 128, 128, kv_lora_rank=512, qk_rope_head_dim=64)
JOINT = heads(kv_lora_rank=512, keys_by_position=True)


def taken(engine, layers, *, storage="plain", dtype="bfloat16", **sizes):
    found = reserved(engine, layers, STORAGES[storage], dtype=dtype, **sizes)
    assert found.objection == ""
    return found.bytes


def objection(engine, layers, *, storage="plain", dtype="bfloat16", **sizes):
    found = reserved(engine, layers, STORAGES[storage], dtype=dtype, context=100, **sizes)
    assert found.bytes is None
    return found.objection


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_every_engine_states_its_rule_and_source(engine):
    assert any(letter.isdigit() for letter in engine.name)  # of which version or date
    assert engine.rule
    assert ".py" in engine.source or ".cpp" in engine.source


# --- by hand, from the engines' documents ---------------------------------------------------


def test_vllm_takes_whole_blocks_of_16():
    # Llama 3 8B: 32 layers, 8 key heads of 128; 4,097 tokens are 257 blocks
    assert taken("vllm", [heads()] * 32, context=4097) == 32 * 257 * 16 * 8 * 256 * 2


def test_vllm_stores_the_latent_once_in_blocks_of_64():
    # DeepSeek-V3: 61 layers of 512 + 64; 100 tokens are 2 blocks
    for tp in (1, 8):
        assert taken("vllm", [DEEPSEEK] * 61, context=100, tp=tp) == 61 * 128 * 576 * 2


def test_vllm_pads_groups_of_layers():
    # Gemma 3 27B: 52 windows of 1,024 in groups of the 10 full layers, so 60; 65 blocks touch one
    model = [*[heads(16, window=1024)] * 52, *[heads(16)] * 10]
    assert taken("vllm", model, context=4096) == (60 * 65 * 16 + 10 * 4096) * 16 * 256 * 2
    # 12 windows and 13 full layers: both in groups of 13
    model = [*[heads(8, 64, window=128)] * 12, *[heads(8, 64)] * 13]
    assert taken("vllm", model, context=4096) == 13 * (9 * 16 + 4096) * 8 * 128 * 2


def test_vllm_groups_layers_whose_caches_are_alike():
    """RoPE does not tell layers apart: a model that leaves it out in some has one group."""
    model = [heads(rope="Rotary(128)"), heads(), heads(qk_norm="head")]
    assert taken("vllm", model, context=16) == 3 * 16 * 8 * 256 * 2


def test_vllm_int8_has_a_float32_scale_for_each_key_and_value_of_a_head():
    found = taken("vllm", [heads()], storage="int8", context=16)
    assert found == 16 * 8 * 256 + 2 * 16 * 8 * 4


def test_vllm_repeats_key_heads_where_there_are_more_ranks():
    assert taken("vllm", [heads(8)], context=16, tp=4) == 16 * 2 * 256 * 2
    assert taken("vllm", [heads(8)], context=16, tp=16) == 16 * 1 * 256 * 2
    assert taken("vllm", [DEEPSEEK], context=6400, tp=8, cp=4) == 1600 * 576 * 2


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33])
def test_vllm_windows_hold_at_most_what_its_block_manager_holds(window):
    """Blocks are freed when all their tokens are outside of the window of the next token."""
    most = 0
    for tokens in range(1, 200):
        freed = max(0, tokens - window) // 16
        most = max(most, -(-tokens // 16) - freed)
        assert taken("vllm", [heads(window=window)], context=tokens) == most * 16 * 8 * 256 * 2


@pytest.mark.parametrize(
    ("context", "window", "cells"),
    [
        (1, None, 256),
        (256, None, 256),
        (5000, None, 5120),
        (5000, 1024, 1536),
        (5000, 1000, 1536),
        (5000, 4096, 4608),
        (600, 1024, 768),
    ],
)
def test_llama_cpp_pads_to_256(context, window, cells):
    for limit in ("window", "chunk"):
        layer = heads(**{limit: window})
        assert taken("llama.cpp", [layer], context=context) == cells * 8 * 256 * 2


def test_llama_cpp_quantises_in_blocks_of_32():
    assert taken("llama.cpp", [heads()], storage="int8", context=256) == 256 * 8 * 256 // 32 * 34
    assert taken("llama.cpp", [heads()], storage="int4", context=256) == 256 * 8 * 256 // 32 * 18
    assert taken("llama.cpp", [DEEPSEEK], storage="int8", context=256) == 256 * 18 * 34


def test_llama_cpp_stores_the_latent_once():
    assert taken("llama.cpp", [DEEPSEEK] * 61, context=4096) == 61 * 4096 * 576 * 2


def test_transformers_4_cached_the_keys_and_values_of_every_head():
    old, new = (
        taken(engine, [DEEPSEEK], context=1) for engine in ("transformers-4", "transformers")
    )
    assert (old, new) == (128 * (192 + 128) * 2, 576 * 2)
    assert old // new == 71


# --- by transformers' real cache objects ----------------------------------------------------


def storage_bytes(layer):
    return sum(each.untyped_storage().nbytes() for each in (layer.keys, layer.values))


def filled(layer, context, batch, shape):
    """A cache layer of transformers after a prefill and one decoded token."""
    for tokens in (context - 1, 1):
        k = torch.zeros(batch, shape.num_kv_heads, tokens, shape.head_dim)
        v = torch.zeros(batch, shape.num_kv_heads, tokens, shape.v_head_dim)
        if tokens:
            layer.update(k, v)
    return storage_bytes(layer)


def test_transformers_caches_hold_what_the_rules_say():
    cache_utils = pytest.importorskip("transformers.cache_utils")
    draw = random.Random(0)
    for _ in range(60):
        window = draw.choice([None, 1, 2, 3, 8, 20])
        context, batch = draw.randint(1, 40), draw.randint(1, 3)
        shape = heads(draw.randint(1, 3), 4, 6, draw.choice([4, 6]), window=window)
        full, sliding = cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer
        layer = full() if window is None else sliding(window)
        sizes = {"context": context, "batch": batch, "dtype": "float32"}
        assert taken("transformers", [shape], **sizes) == filled(layer, context, batch, shape)
        full, sliding = cache_utils.StaticLayer, cache_utils.StaticSlidingWindowLayer
        layer = full(context) if window is None else sliding(context, window)
        assert taken("transformers-static", [shape], **sizes) == filled(
            layer, context, batch, shape
        )


def test_transformers_caches_the_latent_of_deepseek_v3():
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        vocab_size=16,
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        for tokens in (7, 1):
            model(torch.ones(2, tokens, dtype=torch.long), past_key_values=cache)
    shape = heads(4, 10, 4, 5, kv_lora_rank=10, qk_rope_head_dim=4)
    found = sum(map(storage_bytes, cache.layers))
    assert taken("transformers", [shape] * 2, context=8, batch=2, dtype="float32") == found


# --- what an engine cannot hold -------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("layer", "dtype", "reason"),
    [
        (heads(state_elements=5), "bfloat16", "states of linear attention"),
        (JOINT, "bfloat16", "joint latent"),
        (heads(), "float64", "no cache in float64"),
        (heads(window=5, chunk=8), "bfloat16", "window and chunks"),
    ],
)
def test_no_engine_guesses(engine, layer, dtype, reason):
    assert reason in objection(engine, [heads(), layer], dtype=dtype)


@pytest.mark.parametrize(
    ("engine", "layers", "options", "reason"),
    [
        ("vllm", [heads()], {"storage": "int4"}, "format for int4"),
        ("vllm", [DEEPSEEK], {"storage": "int8"}, "int8 format for latents"),
        ("vllm", [heads(window=5, v_head_dim=64)], {}, "one width"),
        ("vllm", [heads(128, 8, 128, kv_lora_rank=8, window=5)], {}, "no MLA with a window"),
        ("vllm", [heads(8), heads(4)], {}, "differ in size"),
        ("vllm", [heads(8)], {"tp": 3}, "not among 3"),
        ("vllm", [heads(8, num_heads=24)], {"tp": 12}, "not among 12"),
        ("vllm", [heads(window=9)], {"tp": 32, "cp": 2}, "tokens of windows"),
        ("vllm", [heads(8)], {"tp": 8, "cp": 2}, "no groups of cp=2"),
        ("vllm", [DEEPSEEK], {"tp": 8, "cp": 3}, "no groups of cp=3"),
        ("llama.cpp", [heads()], {"tp": 2}, "divides layers among devices"),
        ("llama.cpp", [heads(8, 48)], {"storage": "int8"}, "do not divide 48"),
        ("transformers", [heads()], {"storage": "int8"}, "quantised caches"),
        ("transformers", [heads()], {"cp": 2}, "all tokens on every rank"),
        ("transformers-static", [heads(8)], {"tp": 16}, "16 does not divide 8"),
    ],
)
def test_an_engine_objects_in_a_sentence(engine, layers, options, reason):
    assert reason in objection(engine, layers, **options)


@pytest.mark.parametrize("engine", ENGINES)
def test_layers_with_the_keys_of_others_reserve_nothing(engine):
    sizes = {"context": 300, "batch": 2}
    shared = [heads(), heads(keys_of=0)]
    assert taken(engine, shared, **sizes) == taken(engine, [heads()], **sizes)


@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_never_fall_with_the_context_and_are_proportional_to_the_batch(engine):
    layers = [heads(window=100), heads()]
    found = [taken(engine, layers, context=n) for n in range(1, 700)]
    assert found == sorted(found)
    assert taken(engine, layers, context=77, batch=3) == 3 * taken(engine, layers, context=77)


def test_the_formula_can_be_read():
    (part,) = parts_of("llama.cpp", [heads(window=1024)], PLAIN, dtype="bfloat16")
    numbers = {"batch": 1, "num_kv_heads": 8, "tp": 1, "head_dim": 128, "v_head_dim": 128}
    assert part.formula.with_numbers(**numbers, window=1024, context=5000, itemsize=2) == (
        "1 x 256 x ceil(min(256 x ceil(5000 / 256), 1024 + 512) / 256) x 8 x (128 + 128) x 2"
    )
