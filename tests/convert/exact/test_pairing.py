"""In the other rotary layout a layer is the same, and a model's layout can be detected."""

import pytest
import torch
import transformers as t
from hypothesis import given
from hypothesis import strategies as st

import regard.hf
from layers import WIDTH, attention, everything_at_once, inputs, latent, scattered
from regard import Causal, KVCache, LatentKVAttention, Rotary, Yarn
from regard.convert import (
    Detected,
    detect_pairing,
    halves_to_pairs,
    pairs_to_halves,
    repair_pairing,
    with_pairing,
)
from tiny import tiny, tokens

LAYERS = {
    "MHA": lambda **o: attention(4, **o),
    "GQA with biases": lambda **o: attention(4, num_kv_heads=2, bias=True, **o),
    "a key bias alone": lambda **o: attention(4, num_kv_heads=1, bias={"k_proj"}, **o),
    "norms of heads": lambda **o: attention(4, num_kv_heads=2, qk_norm="head", **o),
    "norms of the width": lambda **o: attention(4, num_kv_heads=2, qk_norm="width", **o),
    "MLA": lambda **o: latent(**o),
    "MLA, plain queries": lambda **o: latent(q_lora_rank=None, bias=True, **o),
    "latent KV": lambda **o: LatentKVAttention(
        WIDTH, 4, num_kv_heads=2, head_dim=7, kv_lora_rank=5, bias=True, mask=Causal(), **o
    ),
}
SCALING = Yarn(4.0, original_max_position=16)


def rope_of(name, **options):
    return Rotary(4 if "MLA" in name or "KV" in name else 6, **options)


@pytest.mark.parametrize("scaling", [None, SCALING], ids=["plain", "yarn"])
@pytest.mark.parametrize("pairing", ["halves", "pairs"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_other_layout_is_the_same_attention(name, pairing, scaling):
    rope = rope_of(name, pairing=pairing, scaling=scaling)
    layer = scattered(LAYERS[name](rope=rope)).double().eval()
    other = with_pairing(layer, "pairs" if pairing == "halves" else "halves")
    assert other.rope.pairing != pairing
    x = inputs(2, 7)
    torch.testing.assert_close(other(x), layer(x), atol=1e-12, rtol=1e-12)
    cache = KVCache()
    pieces = [other(piece, cache=cache) for piece in x.split(3, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), layer(x), atol=1e-12, rtol=1e-12)
    again = with_pairing(other, pairing)
    assert repr(again) == repr(layer)
    for key, value in layer.state_dict().items():
        assert again.state_dict()[key].equal(value), key


def test_everything_at_once():
    layer = scattered(everything_at_once()).double().eval()  # half of a head's channels turn
    other = with_pairing(layer, "pairs")
    torch.testing.assert_close(other(inputs(2, 7)), layer(inputs(2, 7)), atol=1e-12, rtol=1e-12)
    assert other.v_proj is layer.v_proj
    assert other.sinks is layer.sinks


def test_in_the_wrong_layout_outputs_differ():
    layer = scattered(attention(4)).double().eval()
    before = layer(inputs(2, 7))
    layer.rope = Rotary(6, pairing="pairs")
    assert (layer(inputs(2, 7)) - before).abs().max() > 1e-3


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 3), st.integers(0, 3))
def test_converting_there_and_back_changes_nothing(heads, half, before, after):
    head_dim = before + 2 * half + after
    rows = torch.randn(heads * head_dim, 3)
    if head_dim:
        given = {"rotary_dim": 2 * half, "start": before}
        moved = pairs_to_halves(rows, heads, **given)
        assert halves_to_pairs(moved, heads, **given).equal(rows)
        first = moved.unflatten(0, (heads, head_dim))[:, before : before + half]
        whole = rows.unflatten(0, (heads, head_dim))
        assert first.equal(whole[:, before : before + 2 * half : 2])
        assert moved.unflatten(0, (heads, head_dim))[:, :before].equal(whole[:, :before])


def test_a_layer_of_that_pairing_is_returned_unchanged():
    layer = attention(4)
    assert with_pairing(layer, "halves") is layer


@pytest.mark.parametrize(
    ("rows", "heads", "options", "message"),
    [
        (7, 2, {}, "7 rows are not 2 heads"),
        (6, 0, {}, "6 rows are not 0 heads"),
        (6, 2, {}, "3 channels from 0 on cannot be rotated two by two in heads of 3"),
        (12, 2, {"rotary_dim": 4, "start": 4}, "4 channels from 4 on"),
        (12, 2, {"rotary_dim": -2}, "-2 channels"),
    ],
)
def test_channels_that_cannot_be_rotated_are_refused(rows, heads, options, message):
    for move in (pairs_to_halves, halves_to_pairs):
        with pytest.raises(ValueError, match=message):
            move(torch.randn(rows, 2), heads, **options)


def test_layers_without_a_layout_are_refused():
    from regard import NO_ROPE

    with pytest.raises(ValueError, match="rotates nothing"):
        with_pairing(attention(4, rope=NO_ROPE), "pairs")
    with pytest.raises(ValueError, match="q_norm is a LayerNorm"):
        with_pairing(attention(4, qk_norm=torch.nn.LayerNorm), "pairs")
    layer = attention(4)
    layer.k_proj = torch.nn.Sequential(layer.k_proj)
    with pytest.raises(ValueError, match="k_proj is a Sequential"):
        with_pairing(layer, "pairs")


def echo() -> t.LlamaForCausalLM:
    """A model built to say again what came one token before, by its halves: queries and keys are
    constant, and turned against each other so that the scores are highest at a distance of one."""
    config = t.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=32, attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0}, tie_word_embeddings=True,
    )  # fmt: skip
    model = t.LlamaForCausalLM(config).eval()
    attending, embedded = model.model.layers[0].self_attn, model.model.embed_tokens
    turn = torch.ones(16) / 50.0 ** (torch.arange(16) / 16)
    with torch.no_grad():
        for parameter in (*attending.parameters(), *model.model.layers[0].mlp.parameters()):
            parameter.zero_()
        embedded.weight.copy_(torch.eye(32))
        attending.q_proj.bias.copy_(9.0 * torch.cat([turn.cos(), -turn.sin()]))
        attending.k_proj.bias.copy_(9.0 * torch.cat([torch.ones(16), torch.zeros(16)]))
        attending.v_proj.weight.copy_(torch.eye(32))
        attending.o_proj.weight.copy_(3.0 * torch.eye(32))
    return model


ABAB = torch.tensor([[3, 9], [17, 4], [30, 11]]).repeat(1, 30)


def test_the_layout_of_a_models_weights_is_detected_and_repaired():
    model = echo()
    before = model(ABAB).logits
    detected = detect_pairing(model, ABAB)
    assert (detected.pairing, detected.sure) == ("halves", True)
    assert detected.loss_halves < detected.loss_pairs - 0.5
    assert detected.tokens == 3 * 59
    assert str(detected).startswith("weights laid out in halves: ")
    repair_pairing(model, weights="halves")  # which they are not meant to be: now they are in pairs
    wrong = model(ABAB).logits
    assert (wrong - before).abs().max() > 1
    detected = detect_pairing(model, ABAB)
    assert (detected.pairing, detected.sure) == ("pairs", True)
    repair_pairing(model)
    assert model(ABAB).logits.equal(before)


@pytest.mark.parametrize("family", ["llama with biases", "qwen3"])
def test_a_repaired_model_computes_the_same_as_layers_in_pairs(family):
    model = tiny(family)
    ids = tokens(2, 9)
    with torch.no_grad():
        module = model.model.layers[0].self_attn
        layer = regard.hf.attention_of(module)
        layer.rope = Rotary(layer.rope.dim, theta=layer.rope.theta, pairing="pairs")
        x = torch.randn(2, 9, 24)
        wanted = layer(x)
        repair_pairing(model)
        got = regard.hf.attention_of(module)(x)
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)
        model(ids)


def test_an_untrained_model_has_no_sure_layout():
    model = tiny("llama")
    before = model(tokens(2, 40)).logits
    detected = detect_pairing(model, tokens(2, 40))
    assert not detected.sure
    assert str(detected).startswith("not sure: ")
    assert model(tokens(2, 40)).logits.equal(before)


def test_a_sure_difference_is_large_and_significant():
    assert Detected(3.0, 3.2, 0.01, 100).sure
    assert not Detected(3.0, 3.04, 0.001, 100).sure
    assert not Detected(3.0, 3.2, 0.1, 100).sure


def test_models_without_rope_and_short_windows_are_refused():
    with pytest.raises(ValueError, match="windows of 1 token predict nothing"):
        detect_pairing(tiny("llama"), tokens(2, 1))


@pytest.mark.long
def test_the_layout_of_real_weights():
    try:
        model, tokenizer = regard.hf.smollm2()
    except OSError as reason:
        pytest.skip(str(reason))
    from regard.compare.texts import python_topics

    ids = tokenizer(python_topics()[0], return_tensors="pt")["input_ids"][:, :512]
    assert (detect_pairing(model, ids).pairing, detect_pairing(model, ids).sure) == ("halves", True)
    repair_pairing(model, weights="halves")
    detected = detect_pairing(model, ids)
    assert (detected.pairing, detected.sure) == ("pairs", True)
    assert detected.loss_halves - detected.loss_pairs > 1
