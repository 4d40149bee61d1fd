"""Keys that are scaled and rotated values, beside the oracle and transformers' Gemma 4."""

import pytest
import torch
import transformers as t
from transformers.models.gemma4 import modeling_gemma4 as gemma

import oracle
from forms import CACHES, additive, bound_of, float64, gradients, stepwise
from regard import (
    NO_ROPE,
    Causal,
    Frequencies,
    KVCache,
    Padding,
    QuantizedCache,
    Rotary,
    SlidingCache,
    SlidingWindow,
    TiedKVAttention,
)

TOKENS = 9
PROPORTIONAL = Rotary(8, scaling=Frequencies([1.0, 0.3, 0.0, 0.0]))
ROPES = [NO_ROPE, Rotary(4), Rotary(8), PROPORTIONAL, Rotary(4, pairing="pairs")]
FORMS = ["absorbed", "expanded"]


def layer_of(rope, **options) -> TiedKVAttention:
    torch.manual_seed(5)
    layer = TiedKVAttention(
        12, 4, num_kv_heads=2, head_dim=8, rope=rope, mask=Causal(), scale=0.4, **options
    )
    for each in layer.parameters():
        torch.nn.init.normal_(each, std=0.5)
    return layer.double()


def x_of(rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, TOKENS, 12, dtype=torch.float64)


def judged(layer, x) -> torch.Tensor:
    """The layer by its definition, keys and values apart, with attention by plain loops."""
    q, k = ((p(x).unflatten(-1, (-1, 8)).transpose(1, 2)) for p in (layer.q_proj, layer.k_proj))
    root = (k.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    v = k / root
    places = torch.arange(x.shape[1])
    k = layer.rope.rotate(v * layer.k_norm.weight, places)
    q = q / (q.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * layer.q_norm.weight
    q = layer.rope.rotate(q, places)
    lists = (each.tolist() for each in (q, k, v))
    out = oracle.attention(*lists, visible=lambda b, h, i, j: j <= i, scale=0.4).out
    return layer.o_proj(torch.tensor(out, dtype=torch.float64).transpose(1, 2).flatten(2))


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rope", ROPES, ids=repr)
def test_it_is_attention_with_keys_of_its_values(rope, form):
    layer, x = layer_of(rope, form=form), x_of()
    wanted = judged(layer, x)
    torch.testing.assert_close(layer(x), wanted)
    for name, cache in CACHES.items():
        out = stepwise(layer, x, cache())
        assert (out - wanted).abs().max() <= bound_of(name), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rope", ROPES, ids=repr)
def test_one_query_and_many_read_the_same_keys(rope, form):
    """Few queries are absorbed, many rebuild the keys: weights and gradients are the same."""
    layer, x = layer_of(rope, form=form), x_of()
    whole, cache = layer.weights(x), KVCache()
    with torch.no_grad():
        layer(x[:, :-1], cache=cache)
        last = layer.weights(x[:, -1:], cache=cache)
    torch.testing.assert_close(last, whole[:, :, -1:].detach())
    other = layer_of(rope, form="expanded")
    wanted = gradients(other, other(x))
    pieces = KVCache()
    stepped = torch.cat([layer(each, cache=pieces) for each in x.split(1, 1)], 1)
    for name, gradient in gradients(layer, stepped).items():
        torch.testing.assert_close(gradient, wanted[name], msg=name)


@pytest.mark.parametrize(
    ("rope", "form", "numbers", "position"),
    [
        (NO_ROPE, "absorbed", 8, 0),
        (Rotary(4), "absorbed", 12, 0),
        (PROPORTIONAL, "absorbed", 12, 0),
        (Rotary(8), "absorbed", 16, 0),
        (PROPORTIONAL, "expanded", 8, 4),
    ],
    ids=repr,
)
def test_the_cache_holds_values_and_what_is_rotated(rope, form, numbers, position):
    from regard.plan import STORAGES
    from regard.plan.cache_bytes import cache_bytes
    from regard.plan.modules import shape_of
    from regard.plan.shapes import Workload
    from regard.plan.weights import parameters

    layer, cache = layer_of(rope, form=form), KVCache()
    stepwise(layer, x_of(1), cache)
    heads = 2
    assert cache.nbytes == TOKENS * (heads * numbers * 8 + position)
    shape, work = shape_of(layer), Workload(context=TOKENS, dtype="float64")
    assert cache_bytes(shape, STORAGES["plain"], work) == cache.nbytes
    assert parameters(shape, work) == sum(each.numel() for each in layer.parameters())


def gemma4(rotated: float, form: str):
    """Gemma 4's module of a global layer, its angles, and the layer that computes the same."""
    rope = {"rope_type": "proportional", "partial_rotary_factor": rotated, "rope_theta": 50.0}
    sliding = {"rope_type": "default", "rope_theta": 10.0}
    config = t.Gemma4TextConfig(
        hidden_size=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=2,
        head_dim=8,
        global_head_dim=8,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        attention_k_eq_v=True,
        num_kv_shared_layers=0,
        rope_parameters={"full_attention": rope, "sliding_attention": sliding},
    )
    config._attn_implementation = "eager"
    module = gemma.Gemma4TextAttention(config, 0).eval()
    angles = gemma.Gemma4TextRotaryEmbedding(config)
    frequencies = angles.full_attention_inv_freq.tolist()
    layer = TiedKVAttention(
        12, 4, num_kv_heads=2, head_dim=8, scale=1.0, mask=Causal(), norm_eps=config.rms_norm_eps,
        rope=Rotary(8, scaling=Frequencies(frequencies)), form=form,
    )  # fmt: skip
    for each in module.parameters():
        torch.nn.init.normal_(each, std=0.5)
    layer.load_state_dict(module.state_dict())
    return module, angles, layer


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rotated", [0.5, 1.0])
def test_it_is_gemma_4(rotated, form):
    with float64():
        torch.manual_seed(1)
        module, angles, layer = gemma4(rotated, form)
        x = x_of()
        places = torch.arange(TOKENS)[None]
        mask = additive(TOKENS).expand(2, -1, -1, -1)
        turned = angles(x, places, "full_attention")
        wanted = module(x, turned, mask, {})[0]
        torch.testing.assert_close(layer(x), wanted, rtol=0, atol=3e-6)  # norms are in float32
        ours, theirs = gradients(layer, layer(x)), gradients(module, wanted)
        for name, gradient in ours.items():
            torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=3e-5, msg=name)


def test_padding_is_hidden():
    layer, x = layer_of(Rotary(4)), x_of()
    valid = torch.ones(2, TOKENS, dtype=torch.bool)
    valid[1, :3] = False
    positions = (valid.long().cumsum(1) - 1).clamp(min=0)
    out = layer(x, mask=Padding(valid), positions=positions)
    torch.testing.assert_close(out[1:, 3:], layer(x[1:, 3:]))


@pytest.mark.parametrize("form", FORMS)
def test_a_window_is_cut_in_its_cache(form):
    layer, x = layer_of(PROPORTIONAL, form=form), x_of()
    layer.mask = Causal() & SlidingWindow(3)
    out = stepwise(layer, x, SlidingCache(3))
    torch.testing.assert_close(out, layer(x).detach())


@pytest.mark.usefixtures("unchecked")
def test_its_words_and_its_code():
    import regard

    layer, x = layer_of(Rotary(4)), x_of(1)
    again = eval(repr(layer), vars(regard))
    assert sorted(again.state_dict()) == sorted(layer.state_dict())
    assert layer.kind == "GQA"
    assert layer.explain(x[:, :1]).startswith("form     absorbed")
    assert layer.explain(x).startswith("form     expanded")
    with pytest.raises(ValueError, match="form is 'absorbed' or 'expanded'"):
        layer_of(NO_ROPE, form="auto")


def test_codes_rotate_values_apart_from_keys():
    """With few bits the values, the first piece, are rotated alone."""
    layer, cache = layer_of(Rotary(4)), QuantizedCache(format="K8V4", group=8)
    with torch.no_grad():
        x = x_of()
        out = stepwise(layer, x, cache)
        assert (out - layer(x)).abs().max() < 0.05


def test_it_is_built_and_loaded_on_any_device():
    sizes = {"num_kv_heads": 2, "head_dim": 8, "rope": Rotary(4), "mask": Causal()}
    layer, x = TiedKVAttention(32, 4, **sizes), torch.randn(1, 3, 32)
    with torch.device("meta"):
        other = TiedKVAttention(32, 4, **sizes)
    other.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(other(x), layer(x))
