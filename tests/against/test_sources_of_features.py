"""Norms, caps, sinks, biases and gates, each alone and all at once, judged by numpy."""

import numpy as np
import pytest
import torch
from torch import nn

import plain
from plain import decode, differs, draw, judge, ready, same
from regard import (
    Alibi,
    Attention,
    Causal,
    KVCache,
    Padding,
    RelativeBias,
    Rotary,
    SlidingCache,
    SlidingWindow,
    StaticCache,
)

B, L, E = 2, 7, 15
HEADS, KEYS, SIZE = 6, 2, 4


def gqa(**options):
    options = {"mask": Causal(), **options}
    return ready(Attention(E, HEADS, num_kv_heads=KEYS, head_dim=SIZE, **options))


def without(layer, *names):
    """What the judge says of the same layer without some of its parameters."""
    w = {n: v for n, v in plain.weights_of(layer).items() if not n.startswith(names)}
    assert len(w) < len(layer.state_dict())
    twin = ready(Attention(E, HEADS, num_kv_heads=KEYS, head_dim=SIZE))
    twin.load_state_dict({name: torch.tensor(value) for name, value in w.items()})
    return twin


def distances():
    """Key slot less query slot."""
    return np.arange(L)[None, :] - np.arange(L)[:, None]


def bucket_of(distance: int) -> int:
    """T5's bucket, causal, of 8 with all beyond 6 in the last: 4 near ones, 4 growing by ratios."""
    back = max(-distance, 0)
    if back < 4:
        return back
    return min(4 + int(np.log(back / 4) / np.log(6 / 4) * 4), 7)


def test_qk_norm_of_each_head():
    layer, x = gqa(qk_norm="head"), draw(B, L, E)
    assert layer.q_norm.weight.shape == layer.k_norm.weight.shape == (SIZE,)
    same(layer(x), judge(layer, x)[0])
    same(decode(layer, x, KVCache()), judge(layer, x)[0])
    differs(layer(x), judge(without(layer, "q_norm", "k_norm"), x)[0])


def test_qk_norm_of_all_heads_at_once():
    layer, x = gqa(qk_norm="width"), draw(B, L, E)
    assert layer.q_norm.weight.shape == (HEADS * SIZE,)
    assert layer.k_norm.weight.shape == (KEYS * SIZE,)
    same(layer(x), judge(layer, x)[0])


@pytest.mark.parametrize("norm", ["head", "width"])
def test_qk_norm_with_an_epsilon_that_counts(norm):
    layer, x = gqa(qk_norm=norm, norm_eps=0.3), draw(B, L, E)
    same(layer(x), judge(layer, x, eps=0.3)[0])
    differs(layer(x), judge(layer, x)[0])


@pytest.mark.parametrize(
    ("options", "biased"),
    [
        ({"bias": True}, "qkvo"),
        ({"bias": True, "out_bias": False}, "qkv"),
        ({"out_bias": True}, "o"),
        ({"bias": {"q_proj", "v_proj"}}, "qv"),
        ({"bias": {"k_proj"}, "out_bias": True}, "ko"),
    ],
)
def test_projections_with_biases(options, biased):
    layer, x = gqa(**options), draw(B, L, E)
    names = {name for name, _ in layer.named_parameters() if name.endswith("bias")}
    assert names == {f"{letter}_proj.bias" for letter in biased}
    same(layer(x), judge(layer, x)[0])


def test_qk_norm_of_ones_own():
    """A function from a size to a module; here one that halves."""

    class Halve(nn.Module):
        def forward(self, x):
            return x / 2

    sizes = []
    layer = gqa(qk_norm=lambda size: (sizes.append(size), Halve())[1])
    x = draw(B, L, E)
    assert sizes == [SIZE, SIZE]
    same(layer(x), judge(layer, x, scale=SIZE**-0.5 / 4)[0])


def test_qk_norm_comes_before_rotation():
    """Norm weights that are not one do not commute with turning."""
    layer, x = gqa(qk_norm="head", rope=Rotary(SIZE, theta=20.0)), draw(B, L, E)
    turns = plain.frequencies(SIZE, 20.0)
    same(layer(x), judge(layer, x, turn=lambda h: plain.rotate(h, turns))[0])


def test_softcap():
    layer, x = gqa(softcap=0.4), draw(B, L, E)
    same(layer(x), judge(layer, x, softcap=0.4)[0])
    differs(layer(x), judge(layer, x)[0])


def test_sinks_take_their_share_and_give_nothing():
    layer, x = gqa(sinks=True), draw(B, L, E)
    expected, weights = judge(layer, x)
    same(layer(x), expected)
    same(layer.weights(x), weights)
    differs(layer(x), judge(without(layer, "sinks"), x)[0])
    same(decode(layer, x, KVCache()), expected)


def test_score_bias_as_a_tensor():
    x = draw(B, L, E)
    for shape in ((L, L), (HEADS, 1, L), (B, 1, L, L), (B, HEADS, L, L)):
        bias = draw(*shape)
        layer = gqa(score_bias=bias)
        added = plain.array(bias.expand(B, HEADS, L, L))
        same(layer(x), judge(layer, x, bias=added)[0])


def test_score_bias_as_alibi():
    slopes = [0.5, 0.25, 1.0, 0.1, 0.0, 2.0]
    layer, x = gqa(score_bias=Alibi(slopes)), draw(B, L, E)
    bias = np.stack([-slope * np.abs(distances()) for slope in slopes])[None].repeat(B, 0)
    same(layer(x), judge(layer, x, bias=bias)[0])
    same(decode(layer, x, StaticCache(L)), judge(layer, x, bias=bias)[0])


def relative(layer):
    table = plain.weights_of(layer)["score_bias.relative_attention_bias.weight"]
    return np.vectorize(bucket_of)(distances()), table


def test_score_bias_as_t5s():
    rule = RelativeBias(HEADS, num_buckets=8, max_distance=6, bidirectional=False)
    layer, x = gqa(score_bias=rule, scale=1.0), draw(B, L, E)
    buckets, table = relative(layer)
    bias = np.moveaxis(table[buckets], -1, 0)[None].repeat(B, 0)
    same(layer(x), judge(layer, x, scale=1.0, bias=bias)[0])
    same(decode(layer, x, KVCache()), judge(layer, x, scale=1.0, bias=bias)[0])


@pytest.mark.parametrize(("gate", "width"), [("head", HEADS), ("channel", HEADS * SIZE)])
def test_output_gate(gate, width):
    layer, x = gqa(gate=gate), draw(B, L, E)
    assert layer.gate_proj.weight.shape == (width, E)
    same(layer(x), judge(layer, x)[0])
    same(decode(layer, x, KVCache()), judge(layer, x)[0])
    differs(layer(x), judge(without(layer, "gate_proj"), x)[0])


def all_of_them():
    return gqa(
        bias=True,
        qk_norm="head",
        rope=Rotary(2, theta=30.0, pairing="pairs"),
        mask=Causal() & SlidingWindow(4),
        scale=0.9,
        score_bias=RelativeBias(HEADS, num_buckets=8, max_distance=6, bidirectional=False),
        softcap=1.1,
        sinks=True,
        gate="head",
    )


def judge_of_all(layer, x, sees):
    buckets, table = relative(layer)
    turns = plain.frequencies(2, 30.0)
    return judge(
        layer,
        x,
        sees,
        turn=lambda heads: plain.rotate(heads, turns, pairs=True),
        scale=0.9,
        softcap=1.1,
        bias=np.moveaxis(table[buckets], -1, 0)[None].repeat(B, 0),
    )


CACHES = {"growing": KVCache, "static": lambda: StaticCache(L), "sliding": lambda: SlidingCache(4)}


@pytest.mark.parametrize("cache", CACHES)
def test_sinks_softcap_bias_window_qk_norm_gate_rope_and_gqa_in_one_layer(cache):
    layer, x = all_of_them(), draw(B, L, E)
    valid = torch.ones(B, L, dtype=torch.bool)
    valid[0, :3] = False
    mask, sees = Padding(valid), plain.padded(valid, plain.window(4))
    expected, weights = judge_of_all(layer, x, sees)
    assert (weights[0].sum((0, 2)) == 0).sum() == 3  # padding that sees nothing at all
    same(layer(x, mask=mask), expected)
    same(layer.weights(x, mask=mask), weights)
    same(layer.train()(x, mask=mask), expected)
    same(decode(layer.eval(), x, CACHES[cache](), mask=mask), expected)
    same(decode(layer, x, CACHES[cache](), sizes=(1,) * L, mask=mask), expected)


def test_all_of_them_train_in_one_layer():
    """The loss goes down, every parameter moves, and what was learned is still what it says."""
    layer, x, target = all_of_them().train(), draw(B, L, E), draw(B, L, E)
    before = plain.weights_of(layer)
    descent = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for _ in range(8):
        loss = (layer(x) - target).square().mean()
        descent.zero_grad()
        loss.backward()
        descent.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    after = plain.weights_of(layer)
    assert all((after[name] != before[name]).any() for name in before)
    same(layer(x), judge_of_all(layer, x, plain.window(4))[0])
