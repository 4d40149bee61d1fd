"""Rotary positions and latent attention as the sources have them, judged by numpy."""

import math

import pytest
import torch

import plain
from plain import decode, differs, draw, judge, ready, same
from regard import (
    NTK,
    Attention,
    Causal,
    KVCache,
    LatentKVAttention,
    LinearScaling,
    Llama3,
    LongRope,
    MultiHeadLatentAttention,
    Rotary,
    StaticCache,
    Yarn,
)

B, L, E = 2, 7, 15
SIZES = {"kv_lora_rank": 7, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 3}


@pytest.mark.parametrize("pairing", ["halves", "pairs"])
@pytest.mark.parametrize("dim", [2, 4, 6])
def test_rope_interleaved_and_half_whole_and_partial(pairing, dim):
    rope = Rotary(dim, theta=50.0, pairing=pairing)
    layer = ready(Attention(E, 4, num_kv_heads=2, head_dim=6, rope=rope, mask=Causal()))
    x = draw(B, L, E)

    def turn(heads, pairs=pairing == "pairs"):
        return plain.rotate(heads, plain.frequencies(dim, 50.0), pairs=pairs)

    expected = judge(layer, x, turn=turn)[0]
    same(layer(x), expected)
    same(decode(layer, x, KVCache()), expected)
    if dim > 2:
        differs(layer(x), judge(layer, x, turn=lambda h: turn(h, pairs=pairing == "halves"))[0])


def slowed_by_yarn(turns, dim, theta, factor, original, fast=32, slow=1):
    """Which pairs turn often enough within the original length to be kept, with a ramp between."""
    where = [
        dim * math.log(original / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in (fast, slow)
    ]
    low, high = max(math.floor(where[0]), 0), min(math.ceil(where[1]), dim - 1)
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(dim // 2)]
    return [t * (1 - r) + t / factor * r for t, r in zip(turns, ramp, strict=True)]


def slowed_by_llama3(turns, factor, low, high, original):
    slowed = []
    for t in turns:
        wavelength = 2 * math.pi / t
        if wavelength > original / low:
            slowed.append(t / factor)
        elif wavelength < original / high:
            slowed.append(t)
        else:
            smooth = (original / wavelength - low) / (high - low)
            slowed.append((1 - smooth) * t / factor + smooth * t)
    return slowed


DIM, THETA = 8, 40.0
TURNS = plain.frequencies(DIM, THETA)
GROWN = 0.1 * math.log(4) + 1
SCALINGS = {
    "linear": (LinearScaling(3.0), [t / 3 for t in TURNS], 1.0),
    "NTK": (NTK(3.0), plain.frequencies(DIM, THETA * 3 ** (DIM / (DIM - 2))), 1.0),
    "dynamic NTK": (  # seven slots where four were trained
        NTK(3.0, original_max_position=4),
        plain.frequencies(DIM, THETA * (3 * L / 4 - 2) ** (DIM / (DIM - 2))),
        1.0,
    ),
    "YaRN": (
        Yarn(4.0, original_max_position=64, beta_fast=8),
        slowed_by_yarn(TURNS, DIM, THETA, 4.0, 64, fast=8),
        GROWN,
    ),
    "YaRN, with DeepSeek's mscales": (
        Yarn(4.0, original_max_position=64, beta_fast=8, mscale=0.6, mscale_all_dim=1.4),
        slowed_by_yarn(TURNS, DIM, THETA, 4.0, 64, fast=8),
        (0.06 * math.log(4) + 1) / (0.14 * math.log(4) + 1),
    ),
    "Llama 3": (
        Llama3(8.0, original_max_position=32),
        slowed_by_llama3(TURNS, 8.0, 1.0, 4.0, 32),
        1.0,
    ),
    "LongRoPE, short": (
        LongRope([1, 2, 3, 4], [5, 6, 7, 8], original_max_position=16, factor=4),
        [t / n for t, n in zip(TURNS, (1, 2, 3, 4), strict=True)],
        math.sqrt(1 + math.log(4) / math.log(16)),
    ),
    "LongRoPE, long": (
        LongRope([1, 2, 3, 4], [5, 6, 7, 8], original_max_position=4, factor=4),
        [t / n for t, n in zip(TURNS, (5, 6, 7, 8), strict=True)],
        math.sqrt(1 + math.log(4) / math.log(4)),
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_with_every_scaling(name):
    scaling, turns, grow = SCALINGS[name]
    rope = Rotary(DIM, theta=THETA, scaling=scaling)
    layer = ready(Attention(E, 4, num_kv_heads=2, head_dim=9, rope=rope, mask=Causal()))
    x = draw(B, L, E)
    scale = 9**-0.5 * ((0.14 * math.log(4) + 1) ** 2 if "mscales" in name else 1)
    expected, _ = judge(layer, x, turn=lambda h: plain.rotate(h, turns, grow=grow), scale=scale)
    same(layer(x), expected)
    differs(layer(x), judge(layer, x, turn=lambda h: plain.rotate(h, TURNS))[0])


def mla(**options) -> MultiHeadLatentAttention:
    rope = options.pop("rope", Rotary(4, pairing="pairs"))
    return MultiHeadLatentAttention(E, 3, **SIZES, rope=rope, mask=Causal(), **options)


FORMS = ["expanded", "absorbed", "auto"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("q_lora_rank", [None, 6])
def test_mla_plain_form(form, q_lora_rank):
    """Low ranks without norms, a rotary key of its own, and a scale of its own."""
    layer = ready(mla(latent_norm=False, scale=0.21, form=form, q_lora_rank=q_lora_rank))
    x, turns = draw(B, L, E), plain.frequencies(4, 10_000.0)
    w = plain.weights_of(layer)
    expected = plain.latent_attention(w, plain.array(x), SIZES, turns, scale=0.21, norm=False)
    assert not any("norm" in name for name in w)
    same(layer(x), expected)
    same(decode(layer, x, KVCache()), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("yarn", [False, True])
@pytest.mark.parametrize("q_lora_rank", [None, 6])
def test_mla_deepseek_v3_form(form, yarn, q_lora_rank):
    rope, turns = Rotary(4, theta=30.0, pairing="pairs"), plain.frequencies(4, 30.0)
    scale, grow = (5 + 4) ** -0.5, 1.0
    if yarn:
        scaling = Yarn(4.0, original_max_position=64, mscale=0.6, mscale_all_dim=1.4)
        rope = Rotary(4, theta=30.0, pairing="pairs", scaling=scaling)
        turns = slowed_by_yarn(turns, 4, 30.0, 4.0, 64)
        grow = (0.06 * math.log(4) + 1) / (0.14 * math.log(4) + 1)
        scale *= (0.14 * math.log(4) + 1) ** 2
    layer = ready(mla(form=form, q_lora_rank=q_lora_rank, bias=True, rope=rope))
    x = draw(B, L, E)
    w = plain.weights_of(layer)
    expected = plain.latent_attention(w, plain.array(x), SIZES, turns, scale=scale, grow=grow)
    same(layer(x), expected)
    same(decode(layer, x, StaticCache(L)), expected)


def test_mla_at_inference_caches_the_latent_and_absorbs_the_matrices():
    """Rank + rotary numbers a token whatever the heads; long enough, absorbed by its own choice."""
    layer, x, cache = ready(mla(q_lora_rank=6)), draw(B, 40, E), KVCache()
    with torch.no_grad():
        decode(layer, x[:, :39], cache, sizes=(39,))
        assert cache.nbytes == B * 39 * (7 + 4) * 8
        assert "absorbed" in layer.explain(x[:, 39:], cache=cache).splitlines()[0]
        assert "expanded" in layer.explain(x).splitlines()[0]
        last = layer(x[:, 39:], cache=cache)
    w, turns = plain.weights_of(layer), plain.frequencies(4, 10_000.0)
    expected = plain.latent_attention(w, plain.array(x), SIZES, turns, scale=9**-0.5)
    same(last, expected[:, 39:])
    (part,) = cache.peek(torch.zeros(B, 1, 0, 11, dtype=torch.float64))
    assert [tuple(stream.shape) for stream in part.streams] == [(B, 1, 40, 11)]
    down = plain.linear(w, "kv_a_proj_with_mqa", plain.array(x))
    same(part.streams[0][:, 0, :, :7], plain.rms(down[..., :7], w["kv_a_layernorm.weight"]))
    same(part.streams[0][..., 7:], plain.rotate(down[:, None, :, 7:], turns, pairs=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("latent_norm", [False, True])
def test_mla_trains_in_both_forms(form, latent_norm):
    """The loss goes down, every parameter moves, and both forms follow the same path."""
    x, target = draw(B, L, E), draw(B, L, E)
    paths = []
    for each in (form, "expanded"):
        torch.manual_seed(1)
        layer = ready(mla(form=each, latent_norm=latent_norm, q_lora_rank=6)).train()
        before = plain.weights_of(layer)
        descent = torch.optim.SGD(layer.parameters(), lr=0.05)
        paths.append([])
        for _ in range(8):
            loss = (layer(x) - target).square().mean()
            descent.zero_grad()
            loss.backward()
            descent.step()
            paths[-1].append(loss.item())
        after = plain.weights_of(layer)
        assert all((after[name] != before[name]).any() for name in before)
    assert paths[0][-1] < paths[0][0]
    assert paths[0] == pytest.approx(paths[1], rel=1e-10)


def latent_kv(**options) -> LatentKVAttention:
    sizes = {"num_kv_heads": 2, "head_dim": 4, "kv_lora_rank": 7}
    return LatentKVAttention(E, 6, **sizes, rope=Rotary(4), mask=Causal(), **options)


LATENTS = {
    "MLA, expanded": lambda: mla(form="expanded", dropout=0.4),
    "MLA, absorbed": lambda: mla(form="absorbed", dropout=0.4),
    "latent KV": lambda: latent_kv(dropout=0.4),
}


@pytest.mark.parametrize("kind", LATENTS)
def test_latent_attention_with_dropout_in_training_only(kind):
    """The same row many times: no two alike, and on average what it is without dropout."""
    layer, x, rows = ready(LATENTS[kind]()), draw(1, L, E), 2000
    calm = layer(x)
    with torch.no_grad():
        out = layer.train()(x.expand(rows, L, E))
    spread = out.std(0)
    assert (spread > 0).all()
    assert ((out.mean(0) - calm[0]).abs() < 6 * spread / math.sqrt(rows)).all()
    again = layer.eval()(x.expand(2, L, E))
    same(again, plain.array(calm.expand(2, L, E)))


def test_latent_kv_opens_its_latents_and_then_rotates():
    """Keys of all heads, then their values; one latent and one position a token are cached."""
    layer, x, cache = ready(latent_kv(bias=True)), draw(B, L, E), KVCache()
    w, turns = plain.weights_of(layer), plain.frequencies(4, 10_000.0)
    q = plain.heads(plain.linear(w, "q_proj", plain.array(x)), 4)
    opened = plain.linear(w, "kv_b_proj", plain.linear(w, "kv_a_proj", plain.array(x)))
    k, v = plain.heads(opened[..., :8], 4), plain.heads(opened[..., 8:], 4)
    out, _ = plain.attention(plain.rotate(q, turns), plain.rotate(k, turns), v, plain.causal)
    expected = plain.linear(w, "o_proj", plain.side_by_side(out))
    same(layer(x), expected)
    same(decode(layer, x, cache), expected)
    assert cache.nbytes == B * L * (7 * 8 + 4)
