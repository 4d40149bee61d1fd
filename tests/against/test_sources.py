"""What the source systems describe, a test for each, judged by layers spelled out in numpy."""

import math

import numpy as np
import pytest
import torch

import plain
from plain import decode, differs, draw, judge, ready, same
from regard import (
    EVERYTHING,
    Attention,
    Causal,
    Dense,
    GroupedQueryAttention,
    KVCache,
    MultiHeadAttention,
    MultiQueryAttention,
    Padding,
    QuantizedCache,
    Rotary,
    SelfAttention,
    SlidingCache,
    SlidingWindow,
    StaticCache,
    attend,
    split_additive,
)

B, L, E = 2, 7, 15


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
    expected, _ = plain.attention(*numbers, plain.padded(valid()), scale=0.3)
    same(attend(q, k, v, mask=Padding(valid()), scale=0.3), expected)


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


@pytest.mark.parametrize("bits", [8, 4])
def test_mha_with_a_quantised_cache(bits):
    """Keys and values within half a step of their group's range, and attention over just those."""
    layer, x = ready(MultiHeadAttention(12, 3, mask=Causal())), draw(B, L, 12)
    cache, exact = QuantizedCache(bits=bits, group=4), KVCache()
    out = decode(layer, x, cache, sizes=(1,) * L)
    differs(out, judge(layer, x)[0])
    decode(layer, x, exact)
    nothing = torch.zeros(B, 3, 0, 4, dtype=torch.float64)
    held, kept = (
        plain.array(torch.stack(tuple(c.peek(nothing, nothing)[0].streams))) for c in (cache, exact)
    )
    low, high = kept.min(-1, keepdims=True), kept.max(-1, keepdims=True)
    coarse = 1 + 2.0**-7  # the zero and the scale are bfloat16, rounded outwards
    step = (high - low + 2.0**-7 * np.abs(low)) / (2**bits - 1) * coarse
    assert (np.abs(held - kept) <= step / 2 + 1e-6 * np.abs(kept)).all()
    w = plain.weights_of(layer)
    q = plain.heads(plain.linear(w, "q_proj", plain.array(x)), 4)
    read, _ = plain.attention(q, held[0], held[1], plain.causal)
    same(out, plain.linear(w, "o_proj", plain.side_by_side(read)))


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


def reading(**options):
    """A layer that reads another sequence, both, and which of the other's tokens are real."""
    layer = ready(Attention(E, 6, num_kv_heads=2, head_dim=4, context_size=11, **options))
    real = torch.ones(B, 5, dtype=torch.bool)
    real[0, 3:] = False
    return layer, draw(B, L, E), draw(B, 5, 11), real


@pytest.mark.parametrize("options", [{}, {"bias": True, "qk_norm": "head"}, {"sinks": True}])
def test_cross_attention_with_its_own_padding_mask(options):
    layer, x, context, real = reading(**options)
    for mask, sees in ((EVERYTHING, lambda *_: True), (Padding(real), plain.padded(real))):
        expected, weights = judge(layer, x, sees, context=context)
        same(layer(x, context=context, mask=mask), expected)
        same(layer.weights(x, context=context, mask=mask), weights)
    keep = torch.rand(B, 1, L, 5) < 0.6
    table = keep[:, 0].tolist()
    expected, _ = judge(layer, x, lambda b, h, i, j: table[b][i][j], context=context)
    same(layer(x, context=context, mask=Dense(keep)), expected)


def test_cross_attention_from_a_memory():
    """Projected once, read at every step, and reordered as beams are."""
    layer, x, context, real = reading(bias=True)
    memory = layer.remember(context)
    expected, weights = judge(layer, x, plain.padded(real), context=context)
    steps = [layer(x[:, i : i + 1], context=memory, mask=Padding(real)) for i in range(L)]
    same(torch.cat(steps, dim=1), expected)
    same(layer.weights(x, context=memory, mask=Padding(real)), weights)
    rows = torch.tensor([1, 0, 1])
    out = layer(x[rows], context=memory.reorder(rows), mask=Padding(real[rows]))
    same(out, expected[rows.numpy()])
    context.zero_()
    same(layer(x, context=memory, mask=Padding(real)), expected)
