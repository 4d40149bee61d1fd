"""What the source systems describe, a test for each, against layers spelled out in numpy.

Float64 throughout: agreement is to the rounding of a few hundred products. The judge is `plain`.
"""

import math
from itertools import pairwise

import numpy as np
import plain
import pytest
import torch
from layers import scattered
from torch import nn

from regard import (
    NO_CACHE,
    NTK,
    Alibi,
    Attention,
    Causal,
    Dense,
    GroupedQueryAttention,
    KVCache,
    LinearScaling,
    Llama3,
    LongRope,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    Padding,
    QuantizedCache,
    RelativeBias,
    Rotary,
    SelfAttention,
    SlidingCache,
    SlidingWindow,
    StaticCache,
    Yarn,
    attend,
    split_additive,
)

B, L, E = 2, 7, 15
SIZES = {"kv_lora_rank": 7, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 3}


def same(ours: torch.Tensor, judged: np.ndarray) -> None:
    """Equal to float64 rounding."""
    assert ours.dtype == torch.float64
    assert tuple(ours.shape) == judged.shape
    ours = plain.array(ours)
    assert np.abs(ours - judged).max() <= 1e-12 * (1 + np.abs(judged).max())


def differs(one: torch.Tensor, other: np.ndarray) -> None:
    """The judge can tell these apart: what is tested makes a difference."""
    assert np.abs(plain.array(one) - other).max() > 1e-3


def ready(layer: nn.Module) -> nn.Module:
    """In float64 and eval mode, no parameter at zero or one."""
    return scattered(layer).double().eval()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def judge(layer, x, sees=plain.causal, context=None, turn=lambda heads: heads, **options):
    """A layer of plain heads: its output and its weights."""
    w, size = plain.weights_of(layer), layer.head_dim
    x = plain.array(x)
    source = x if context is None else plain.array(context)
    q, k, v = (
        plain.heads(plain.linear(w, f"{name}_proj", given), size)
        for name, given in (("q", x), ("k", source), ("v", source))
    )
    if "q_norm.weight" in w and w["q_norm.weight"].shape == (size,):
        q, k = plain.rms(q, w["q_norm.weight"]), plain.rms(k, w["k_norm.weight"])
    out, weights = plain.attention(turn(q), turn(k), v, sees, sinks=w.get("sinks"), **options)
    if "gate_proj.weight" in w:
        gate = plain.sigmoid(plain.linear(w, "gate_proj", x))
        out = out * plain.heads(gate, gate.shape[-1] // layer.num_heads)
    return plain.linear(w, "o_proj", plain.side_by_side(out)), weights


def valid() -> torch.Tensor:
    """Padding on the left of one row, on the right of the other."""
    real = torch.ones(B, L, dtype=torch.int64)
    real[0, :2] = 0
    real[1, 5:] = 0
    return real


def test_scaled_dot_product_attention_with_causal_and_padding_masks():
    q, k, v = draw(B, 4, L, 5), draw(B, 2, L, 5), draw(B, 2, L, 3)
    numbers = [plain.array(t) for t in (q, k, v)]
    same(attend(q, k, v), plain.attention(*numbers)[0])
    same(attend(q, k, v, mask=Causal()), plain.attention(*numbers, plain.causal)[0])
    sees = plain.padded(valid())
    same(attend(q, k, v, mask=Padding(valid()), scale=0.3), judged(numbers, sees, scale=0.3))


def judged(numbers, sees, **options):
    return plain.attention(*numbers, sees, **options)[0]


def test_padding_causal_and_combined_masks():
    layer, x = ready(MultiHeadAttention(E, 3, bias=True)), draw(B, L, E)
    for mask, sees in (
        (Padding(valid()), plain.padded(valid())),
        (Causal(), plain.causal),
        (Padding(valid()) & Causal(), plain.padded(valid(), plain.causal)),
        (Causal() & SlidingWindow(3), plain.window(3)),
    ):
        same(layer(x, mask=mask), judge(layer, x, sees)[0])


def test_single_head_self_attention_with_a_fused_projection():
    """One matrix for all three, as the textbooks draw it: its thirds are the projections."""
    fused = draw(3 * E, E)
    layer = SelfAttention(E, mask=Causal()).double().eval()
    thirds = dict(zip(("q_proj", "k_proj", "v_proj"), fused.chunk(3), strict=True))
    layer.load_state_dict({f"{name}.weight": third for name, third in thirds.items()}, strict=True)
    x = draw(B, L, E)
    projected = plain.array(x) @ plain.array(fused).T
    q, k, v = (projected[:, None, :, i : i + E] for i in (0, E, 2 * E))
    out, weights = plain.attention(q, k, v, plain.causal)
    same(layer(x), out[:, 0])
    same(layer.weights(x), weights)


def test_mha_from_a_2d_mask_of_zeros_and_ones():
    layer, x = ready(MultiHeadAttention(E, 3)), draw(B, L, E)
    expected = judge(layer, x, plain.padded(valid()))[0]
    for mask in (valid(), valid().bool(), valid().double().long()):
        same(layer(x, mask=Padding(mask)), expected)


@pytest.mark.parametrize("shape", [(B, 1, L, L), (B, 3, L, L), (1, 1, L, L), (L, L)])
def test_mha_from_a_4d_mask(shape):
    layer, x = ready(MultiHeadAttention(E, 3)), draw(B, L, E)
    keep = torch.rand(shape) < 0.6
    table = keep.expand(B, 3, L, L).tolist()
    same(layer(x, mask=Dense(keep)), judge(layer, x, lambda b, h, i, j: table[b][h][i][j])[0])


@pytest.mark.parametrize("hidden", [-1e4, -1e9, torch.finfo(torch.float32).min, -math.inf])
def test_mha_from_an_additive_mask(hidden):
    layer, x = ready(MultiHeadAttention(E, 3)), draw(B, L, E)
    keep = torch.rand(B, 1, L, L) < 0.6
    keep |= torch.eye(L).bool()
    additive = torch.zeros(keep.shape).masked_fill(~keep, hidden)
    table = keep.expand(B, 3, L, L).tolist()
    expected = judge(layer, x, lambda b, h, i, j: table[b][h][i][j])[0]
    same(layer(x, mask=Dense.from_additive(additive)), expected)


def test_mha_from_an_additive_mask_that_is_a_bias_too():
    x, keep, bias = draw(B, L, E), torch.rand(1, 3, L, L) < 0.7, draw(1, 3, L, L)
    mask, rest = split_additive(bias.masked_fill(~keep, -math.inf))
    layer = ready(MultiHeadAttention(E, 3, score_bias=rest))
    table, added = keep.tolist()[0], plain.array(bias).repeat(B, 0)
    expected, _ = judge(layer, x, lambda b, h, i, j: table[h][i][j], bias=added)
    same(layer(x, mask=mask), expected)


@pytest.mark.parametrize("head_dim", [1, 4, 9])
def test_mha_with_heads_whose_size_is_independent_of_the_width(head_dim):
    layer, x = ready(MultiHeadAttention(E, 4, head_dim=head_dim, mask=Causal())), draw(B, L, E)
    assert layer.q_proj.weight.shape == (4 * head_dim, E)
    same(layer(x), judge(layer, x)[0])


def test_mha_with_dropout_in_training_only():
    """Every weight is dropped or grown by 1 / (1 - p), and none outside training.

    Values that pick one key each, and an output that is copied: the layer's output is its weights.
    """
    rate, keys = 0.25, 64
    layer = ready(MultiHeadAttention(keys, 1, dropout=rate))
    with torch.no_grad():
        layer.v_proj.weight.copy_(torch.eye(keys))
        layer.o_proj.weight.copy_(torch.eye(keys))
    x = torch.eye(keys, dtype=torch.float64).expand(3, keys, keys)
    weights = plain.array(layer.weights(x))
    same(layer(x), weights[:, 0])
    out = plain.array(layer.train()(x))
    dropped = out == 0
    assert np.allclose(out, np.where(dropped, 0, weights[:, 0] / (1 - rate)), rtol=1e-12)
    spread = math.sqrt(rate * (1 - rate) / dropped.size)
    assert abs(dropped.mean() - rate) < 5 * spread
    same(layer.weights(x), weights)
    same(layer.eval()(x), weights[:, 0])


def test_mha_gives_its_weights():
    layer, x = ready(MultiHeadAttention(E, 3, bias=True, mask=Causal())), draw(B, L, E)
    _, expected = judge(layer, x, plain.padded(valid(), plain.causal))
    weights = layer.weights(x, mask=Padding(valid()))
    same(weights, expected)
    seen = (expected.sum(-1) > 0).astype(float)
    assert np.abs(plain.array(weights).sum(-1) - seen).max() < 1e-12
    cache = KVCache()
    with torch.no_grad():
        layer(x[:, :5], cache=cache)
        same(layer.weights(x[:, 5:], cache=cache), judge(layer, x)[1][:, :, 5:])
    assert cache.length == 5


CACHES = {
    "growing": KVCache,
    "static": lambda: StaticCache(L),
    "sliding": lambda: SlidingCache(3),
}


@torch.no_grad()
def decode(layer, x, cache, sizes=(3, 1, 1, 2), **options):
    edges = np.cumsum([0, *sizes])
    pieces = [layer(x[:, a:b], cache=cache, **options) for a, b in pairwise(edges)]
    assert cache is NO_CACHE or cache.length == x.shape[1]
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("cache", CACHES)
def test_mha_with_a_kv_cache(cache):
    mask, sees = Causal() & SlidingWindow(3), plain.window(3)
    if cache != "sliding":
        mask, sees = Causal(), plain.causal
    layer, x = ready(MultiHeadAttention(E, 3, mask=mask)), draw(B, L, E)
    same(decode(layer, x, CACHES[cache]()), judge(layer, x, sees)[0])
    same(decode(layer, x, CACHES[cache](), sizes=(1,) * L), judge(layer, x, sees)[0])
    both = plain.padded(valid(), sees)
    same(decode(layer, x, CACHES[cache](), mask=Padding(valid())), judge(layer, x, both)[0])


@pytest.mark.parametrize(("bits", "near"), [(8, 0.02), (4, 0.3)])
def test_mha_with_a_quantised_cache_is_near(bits, near):
    layer, x = ready(MultiHeadAttention(E, 3, mask=Causal())), draw(B, L, E)
    expected = judge(layer, x)[0]
    out = plain.array(decode(layer, x, QuantizedCache(bits=bits, group=5)))
    assert 0 < np.abs(out - expected).max() < near * np.abs(expected).max()


def test_mqa():
    layer, x = ready(MultiQueryAttention(E, 5, mask=Causal(), bias=True)), draw(B, L, E)
    assert layer.kind == "MQA"
    assert layer.k_proj.weight.shape == layer.v_proj.weight.shape == (3, E)
    same(layer(x), judge(layer, x)[0])
    same(decode(layer, x, KVCache()), judge(layer, x)[0])


GROUPS = {
    "group size": lambda **o: GroupedQueryAttention(E, 6, 6 // 3, **o),
    "number of groups": lambda **o: GroupedQueryAttention(E, 6, 2, **o),
    "key/value heads": lambda **o: Attention(E, 6, num_kv_heads=2, **o),
}


@pytest.mark.parametrize("by", GROUPS)
@pytest.mark.parametrize("rope", [False, True])
def test_gqa_by_group_size_groups_and_key_value_heads(by, rope):
    turns = plain.frequencies(4, 10_000.0)
    turn = (lambda x: plain.rotate(x, turns)) if rope else (lambda x: x)
    options = {"rope": Rotary(4)} if rope else {}
    layer = ready(GROUPS[by](head_dim=4, mask=Causal(), **options))
    x = draw(B, L, E)
    assert (layer.kind, layer.k_proj.weight.shape) == ("GQA", (8, E))
    expected = judge(layer, x, turn=turn)[0]
    same(layer(x), expected)
    same(decode(layer, x, StaticCache(L)), expected)
    if rope:
        differs(layer(x), judge(layer, x)[0])


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
    same(layer(x), judge(layer, x, turn=lambda h: plain.rotate(h, turns, grow=grow))[0])
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
