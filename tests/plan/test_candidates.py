"""The attentions that a model could have."""

from dataclasses import replace

import pytest

from regard import Attention, Causal, Rotary
from regard.convert import target_of
from regard.plan.candidates import SHARES, cached_elements, choices
from regard.plan.cost import cost_of
from regard.plan.shapes import STORAGES, LayerShape, ModelShape

GQA = LayerShape(
    hidden_size=512, num_heads=16, num_kv_heads=8, head_dim=32, v_head_dim=32, qk_rope_head_dim=32
)
MLA = LayerShape(
    hidden_size=512,
    num_heads=16,
    num_kv_heads=16,
    head_dim=48,
    v_head_dim=32,
    kv_lora_rank=128,
    q_lora_rank=96,
    qk_rope_head_dim=16,
)
LINEAR = replace(GQA, state_elements=100)


def found(*layers):
    model = ModelShape(name="m", architecture="", layers=layers, hidden_size=512)
    chosen, missing = choices(model)
    return {choice.key: choice for choice in chosen}, missing


def test_the_attentions_of_a_gqa_model():
    by_key, missing = found(GQA, GQA)
    assert list(by_key) == [
        *("shipped", "mha", "gqa-4", "gqa-2", "mqa"),
        *("deepseek-50", "deepseek-25", "latent-50", "latent-25"),
    ]
    assert by_key["shipped"].layers == (GQA, GQA)
    assert by_key["mha"].layers[0].num_kv_heads == 16
    assert by_key["gqa-2"].layers[1].num_kv_heads == 2
    assert by_key["deepseek-50"].name == "MLA(208+48), 50 %"
    assert not missing


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (16, ["gqa-8", "gqa-4", "gqa-2"]),
        (12, ["gqa-6", "gqa-4", "gqa-3"]),
        (9, ["gqa-3"]),
        (7, []),
        (1, []),
    ],
)
def test_fewer_heads_are_divisors(heads, expected):
    layer = replace(GQA, num_heads=heads, num_kv_heads=heads)
    assert [key for key in found(layer)[0] if key.startswith("gqa")] == expected


@pytest.mark.parametrize("layer", [GQA, replace(GQA, num_kv_heads=16), MLA])
@pytest.mark.parametrize("share", SHARES)
def test_latents_keep_their_share_of_the_cache(layer, share):
    by_key, _ = found(layer)
    kept = cached_elements(by_key[f"deepseek-{share}"].layers[0])
    assert kept == cached_elements(layer) * share // 100


def test_rows_that_cannot_be_are_left_out_with_a_reason():
    mha = replace(GQA, num_kv_heads=16)
    assert "mha" not in found(mha)[0] and not found(mha)[1]  # it is the shipped one
    tiny = replace(GQA, num_kv_heads=1, head_dim=4, v_head_dim=4, qk_rope_head_dim=4)
    assert "no more than the 2 beside a latent" in found(tiny)[1]["MLA, 25 %"]
    _, missing = found(replace(GQA, sinks=True, qk_norm="head"))
    assert missing["MLA, 50 %"] == "DeepSeek's MLA has no place for qk_norm, sinks"
    assert missing["latent, 25 %"] == "a joint latent has no place for sinks"


def test_windows_and_shared_keys_stay():
    window, shared = replace(GQA, window=100), replace(GQA, keys_of=0)
    for choice in found(window, GQA, shared)[0].values():
        assert [layer.window for layer in choice.layers] == [100, None, None]
        assert [layer.keys_of for layer in choice.layers] == [None, None, 0]


def test_linear_layers_stay_as_they_are():
    for choice in found(LINEAR, GQA)[0].values():
        assert choice.layers[0] == LINEAR
    assert list(found(LINEAR)[0]) == ["shipped"]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("heads", "head_dim", "rotary"), [(8, 32, 32), (1, 64, 64), (3, 20, 12)])
def test_latents_have_the_sizes_that_a_conversion_gives_them(heads, head_dim, rotary, share):
    sizes = {"num_kv_heads": heads, "head_dim": head_dim}
    shape = replace(GQA, **sizes, num_heads=9 if heads == 3 else 16, v_head_dim=head_dim)
    by_key, _ = found(replace(shape, qk_rope_head_dim=rotary))
    layer = Attention(512, shape.num_heads, **sizes, rope=Rotary(rotary), mask=Causal())
    target = target_of(f"deepseek-{share}", [layer])
    assert by_key[f"deepseek-{share}"].name == f"MLA({target.rank}+{target.rope_dim}), {share} %"


def test_layers_with_other_heads_keep_them_if_they_are_fewer():
    few = replace(GQA, num_kv_heads=2)
    by_key, _ = found(few, GQA)
    assert [layer.num_kv_heads for layer in by_key["gqa-4"].layers] == [2, 4]
    assert by_key["deepseek-50"].name == "MLA(48+16) and MLA(208+48), 50 %"
    assert by_key["mqa"].layers == (replace(GQA, num_kv_heads=1),) * 2


def test_mla_becomes_heads_of_its_own_widths():
    layer = found(MLA)[0]["gqa-4"].layers[0]
    assert (layer.kind, layer.num_kv_heads, layer.head_dim, layer.v_head_dim) == ("GQA", 4, 48, 32)
    smaller = found(MLA)[0]["deepseek-50"].layers[0]
    assert (smaller.head_dim, smaller.q_lora_rank, smaller.kv_lora_rank) == (48, 96, 56)


def test_every_choice_has_costs():
    """Biases are those of projections that the new attention has."""
    biased = replace(GQA, bias=("q_proj", "k_proj", "v_proj", "o_proj"))
    latent = replace(MLA, bias=("q_a_proj", "kv_a_proj_with_mqa", "o_proj"))
    for layer in (biased, latent):
        for choice in found(layer)[0].values():
            assert cost_of(choice.layers[0], STORAGES["plain"], context=9).parameters > 0
