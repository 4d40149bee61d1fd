"""LatentKVAttention: positions are cached exactly, and rebuilt keys are normed before rotation."""

import pytest
import torch

import plain
from layers import assert_same, scattered
from regard import (
    NO_CACHE,
    Attention,
    Causal,
    KVCache,
    LatentKVAttention,
    Padding,
    QuantizedCache,
    Rotary,
    StaticCache,
)
from regard.convert import as_latent
from regard.layers.attending import Attending
from regard.layers.latent_kv import AbsorbedValues, RebuiltValues
from regard.ops.backends import BACKENDS
from regard.ops.observed import backends_run

WIDTH, LENGTH = 10, 7
SIZES = {"num_kv_heads": 2, "head_dim": 6, "kv_lora_rank": 5}


def layer_of(**options) -> LatentKVAttention:
    made = LatentKVAttention(WIDTH, 4, **SIZES, rope=Rotary(4), mask=Causal(), **options)
    return scattered(made).double().eval()


def same_attention(**options) -> tuple[Attention, LatentKVAttention]:
    """A GQA layer, whose cache holds rotated keys and no positions, and its latent form."""
    gqa = Attention(WIDTH, 4, num_kv_heads=2, head_dim=6, rope=Rotary(4), mask=Causal(), **options)
    gqa = scattered(gqa).double().eval()
    return gqa, as_latent(gqa)


def x_of(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, LENGTH, WIDTH, dtype=torch.float64)


STEPS = torch.arange(LENGTH)
POSITIONS = {
    "up to the end of int32": STEPS + 2**31 - LENGTH,
    "down to its beginning": STEPS - 2**31,
    "negative": STEPS - 4,
    "one row for all": STEPS[None] + 5,
    "a row for each sequence": torch.stack([STEPS + 2**30, 3 * STEPS - 9]),
    "int32": STEPS.to(torch.int32) * 9,
    "uint8, up to its end": (STEPS + 249).to(torch.uint8),
    "uint32": (STEPS + 2**31 - 9).to(torch.uint32),
}


@torch.no_grad()
@pytest.mark.usefixtures("unchecked")  # the annotation knows signed integers only
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", POSITIONS)
def test_queries_and_keys_are_rotated_at_the_same_positions(name, cached):
    """The judge rotates keys before they are cached, so it stores no positions."""
    positions, x = POSITIONS[name], x_of()
    gqa, latent = same_attention()
    wanted = gqa(x, positions=positions.to(torch.int64))
    cache, pieces = KVCache(), []
    for start, stop in ((0, 3), (3, 4), (4, LENGTH)) if cached else ((0, LENGTH),):
        mine = positions[..., start:stop]
        pieces.append(latent(x[:, start:stop], positions=mine, cache=cache))
    assert_same(torch.cat(pieces, 1), wanted)
    assert_same(latent(x, positions=positions), wanted)


@torch.no_grad()
@pytest.mark.parametrize("cache", [KVCache(), StaticCache(LENGTH), QuantizedCache(8, 4)], ids=repr)
def test_positions_may_be_given_at_some_steps_and_counted_at_others(cache):
    latent, x = layer_of(), x_of()
    pieces = [latent(x[:, :3], cache=cache), latent(x[:, 3:], cache=cache, positions=STEPS[3:])]
    tolerance = 0.1 if isinstance(cache, QuantizedCache) else 1e-11
    assert_same(torch.cat(pieces, 1), latent(x), tolerance)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("call", ["forward", "weights", "explain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.uint64])
def test_positions_that_are_not_integers_are_refused(dtype, call):
    latent, x, cache = layer_of(), x_of(), KVCache()
    latent(x, cache=cache)
    with pytest.raises(TypeError, match=rf"must be integers: .* got {dtype}; use torch.arange"):
        getattr(latent, call)(x, cache=cache, positions=STEPS.to(dtype))
    assert cache.length == LENGTH


BEYOND = [STEPS + 2**31 - 3, STEPS - 2**31 - 1, (STEPS + 2**32 - 9).to(torch.uint32)]


@torch.no_grad()
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("positions", BEYOND, ids=["past int32", "before int32", "uint32"])
def test_positions_that_do_not_fit_int32_are_refused(positions):
    latent, x, cache = layer_of(), x_of(), KVCache()
    latent(x, cache=cache)
    with pytest.raises(ValueError, match=r"fit int32, which the cache holds, got .* subtract"):
        latent(x, cache=cache, positions=positions)
    assert cache.length == LENGTH


@pytest.mark.parametrize("norm", ["head", "width"])
def test_keys_are_rebuilt_then_normed_then_rotated(norm):
    layer, x, cache = layer_of(qk_norm=norm, norm_eps=0.3, bias=True), x_of(), KVCache()
    w, turns, given = plain.weights_of(layer), plain.frequencies(4, 10_000.0), plain.array(x)
    opened = plain.linear(w, "kv_b_proj", plain.linear(w, "kv_a_proj", given))
    q, k = plain.heads(plain.linear(w, "q_proj", given), 6), plain.heads(opened[..., :12], 6)
    q, k = (plain.normed(y, w[f"{n}_norm.weight"], 0.3) for n, y in (("q", q), ("k", k)))
    v = plain.heads(opened[..., 12:], 6)
    out, weights = plain.attention(plain.rotate(q, turns), plain.rotate(k, turns), v, plain.causal)
    wanted = torch.from_numpy(plain.linear(w, "o_proj", plain.side_by_side(out)))
    assert_same(layer(x), wanted)
    assert_same(layer.weights(x), torch.from_numpy(weights))
    with torch.no_grad():
        steps = [layer(step, cache=cache) for step in x.split(2, dim=1)]
    assert_same(torch.cat(steps, 1), wanted)
    assert cache.nbytes == 2 * LENGTH * (5 * 8 + 4)  # nothing more than without a norm


@torch.no_grad()
@pytest.mark.parametrize("norm", [None, "head", "width"])
@pytest.mark.parametrize("queries", [1, 2, LENGTH])
def test_absorbed_values_are_the_values(queries, norm):
    """The judge computes keys and values of its own heads, and no latent."""
    gqa, latent = same_attention(qk_norm=norm)
    x, cache, own = x_of(), KVCache(), KVCache()
    for layer, cached in ((gqa, own), (latent, cache)):
        layer(x, cache=cached)
    form = latent.choose(queries, cache)
    assert type(form) is (RebuiltValues if queries == LENGTH else AbsorbedValues)
    more = x_of()[:, :queries]
    assert_same(latent(more, cache=cache), gqa(more, cache=own))


@torch.no_grad()
@pytest.mark.parametrize("pairing", ["halves", "pairs"])
@pytest.mark.parametrize("make", [KVCache, lambda: StaticCache(LENGTH)], ids=["grows", "is full"])
def test_the_compiled_kernel_reads_latents_of_any_rank(make, pairing, monkeypatch):
    """It reads whole vectors, which reach beyond the last latent. Keys in pairs are made before."""
    pytest.importorskip("numba")
    quickest = BACKENDS["fused"]._replace(estimate=lambda call: 0.0)
    monkeypatch.setitem(BACKENDS, "fused", quickest)
    rope = Rotary(16, pairing=pairing)
    sizes = {"num_kv_heads": 2, "head_dim": 16, "kv_lora_rank": 9}
    layer = LatentKVAttention(WIDTH, 4, **sizes, rope=rope, mask=Causal())
    layer, x, cache = scattered(layer).eval(), x_of().float(), make()
    wanted = layer.double()(x.double())
    with backends_run() as ran:
        steps = [layer.float()(step, cache=cache) for step in x.split([5, 1, 1], dim=1)]
    assert ran["fused"] == 3
    assert_same(torch.cat(steps, 1).double(), wanted, 1e-5)


@torch.no_grad()
def test_both_forms_show_nothing_to_a_row_that_sees_nothing():
    latent, x = layer_of(), x_of()
    hidden = Padding(torch.tensor([[False] * LENGTH, [True] * LENGTH]))
    for form in (AbsorbedValues, RebuiltValues):
        latent.choose = lambda queries, cache, form=form: form(latent)
        out = latent(x, mask=hidden)
        assert not out[0].any()
        assert out[1].any()


def test_gradients_flow_through_absorbed_values():
    gqa, latent = same_attention()
    x = x_of()[:, :1].requires_grad_()
    assert type(latent.choose(1, NO_CACHE)) is AbsorbedValues
    wanted, own = (torch.autograd.grad(each(x).square().sum(), x)[0] for each in (gqa, latent))
    assert_same(own, wanted)


def test_values_that_cannot_be_absorbed_are_rebuilt():
    def form(layer):
        return type(layer.choose(1, NO_CACHE))

    assert form(layer_of()) is AbsorbedValues
    assert form(layer_of(bias=True)) is RebuiltValues  # a row that sees nothing has no value
    hooked = layer_of()
    hooked.kv_b_proj.register_forward_hook(lambda module, given, out: 2 * out)
    assert form(hooked) is RebuiltValues
    with torch.autocast("cpu", torch.bfloat16):
        assert form(layer_of()) is RebuiltValues
    assert type(layer_of().choose(1, Attending())) is RebuiltValues  # ranks split the heads


def test_a_norm_of_ones_own_is_given_the_size_of_a_head():
    sizes = []
    layer = layer_of(qk_norm=lambda size: sizes.append(size) or torch.nn.LayerNorm(size))
    assert sizes == [6, 6]
    x = x_of(1)
    q = torch.nn.functional.layer_norm(
        layer.q_proj(x).unflatten(-1, (4, 6)), (6,), layer.q_norm.weight, layer.q_norm.bias
    )
    assert_same(layer.queries(x), q.transpose(1, 2))


def test_the_repr_builds_the_layer():
    layer = layer_of(qk_norm="head", norm_eps=1e-5)
    assert "qk_norm='head', norm_eps=1e-05" in repr(layer)
    names = {"Rotary": Rotary, "Causal": Causal, "LatentKVAttention": LatentKVAttention}
    assert repr(eval(repr(layer), names)) == repr(layer)


@pytest.mark.usefixtures("unchecked")
def test_a_norm_that_is_none_of_those_is_refused():
    with pytest.raises(ValueError, match="qk_norm is 'head', 'width', None or a function"):
        layer_of(qk_norm="heads")


@pytest.mark.parametrize("norm", ["head", "width"])
def test_gradients_reach_the_norms(norm):
    layer = layer_of(qk_norm=norm)
    layer(x_of()).square().sum().backward()
    assert all(each.grad is not None and each.grad.any() for each in layer.parameters())


@torch.no_grad()
@pytest.mark.parametrize("norm", ["head", "width"])
def test_it_runs_under_autocast(norm):
    layer, x = layer_of(qk_norm=norm).float(), x_of().float()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert (out.float() - layer(x)).abs().max() < 0.1 * layer(x).abs().max()
