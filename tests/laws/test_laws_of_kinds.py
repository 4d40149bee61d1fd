"""What must be true of layers that are each other, in sentences: the names are the specification.

One layer is another with its weights arranged; a row is the same in any company.
"""

import pytest
import torch

from layers import (
    LAYERS,
    WIDTH,
    assert_same,
    attention,
    inputs,
    make,
    scattered,
)
from regard import (
    Causal,
    Chunked,
    GroupedQueryAttention,
    KVCache,
    MultiHeadAttention,
    MultiQueryAttention,
    Padding,
    SlidingWindow,
)

TOKENS = 11


def test_gqa_is_mha_with_shared_keys():
    """Repeating the rows of k_proj and v_proj, head by head, changes nothing."""
    x = inputs(2, TOKENS)
    gqa = scattered(attention(6, num_kv_heads=2, bias=True)).double().eval()
    mha = attention(6, bias=True).double().eval()
    state = gqa.state_dict()
    for name in ("k_proj", "v_proj"):
        for kind in ("weight", "bias"):
            rows = state[f"{name}.{kind}"].unflatten(0, (2, 6))
            state[f"{name}.{kind}"] = rows.repeat_interleave(3, 0).flatten(0, 1)
    mha.load_state_dict(state)
    assert (gqa.kind, mha.kind) == ("GQA", "MHA")
    assert_same(gqa(x), mha(x))


def test_mqa_is_gqa_with_one_head():
    x = inputs(2, TOKENS)
    mqa = MultiQueryAttention(WIDTH, 4).double().eval()
    gqa = GroupedQueryAttention(WIDTH, 4, 1).double().eval()
    gqa.load_state_dict(scattered(mqa).state_dict())
    assert mqa.kind == gqa.kind == "MQA"
    assert_same(mqa(x), gqa(x))


def test_gqa_with_as_many_key_heads_as_heads_is_mha():
    x = inputs(2, TOKENS)
    mha = MultiHeadAttention(WIDTH, 4).double().eval()
    gqa = GroupedQueryAttention(WIDTH, 4, 4).double().eval()
    gqa.load_state_dict(scattered(mha).state_dict())
    assert mha.kind == gqa.kind == "MHA"
    assert_same(mha(x), gqa(x))


def test_the_masks_of_layer_and_call_intersect():
    x = inputs(2, TOKENS)
    rules = [Causal(), SlidingWindow(3), Padding(torch.rand(2, TOKENS) < 0.8), Chunked(4)]
    for own in rules:
        for call in rules:
            torch.manual_seed(3)
            alone = scattered(attention(mask=own)).double().eval()
            torch.manual_seed(3)
            joint = scattered(attention(mask=own & call)).double().eval()
            assert_same(alone(x, mask=call), joint(x))
            assert_same(alone.weights(x, mask=call), joint.weights(x))


@pytest.mark.parametrize("layer", LAYERS)
def test_left_padding_is_right_padding_is_no_padding(layer):
    """With the positions and the mask that say so. What stands in the padding is never read."""
    start = torch.tensor([2])
    layer, x, junk = make(layer), inputs(1, TOKENS), inputs(1, 2, seed=9) * 1e3
    left, right = torch.cat([junk, x], 1), torch.cat([x, junk], 1)
    valid = torch.ones(1, TOKENS + 2).bool()
    chunked = "Chunked" in repr(layer)
    with torch.no_grad():
        expected = layer(x)
        behind = layer(right, mask=Padding(valid.clone().index_fill(1, torch.tensor([11, 12]), 0)))
        assert_same(behind[:, :TOKENS], expected)
        if chunked:
            layer.mask = Causal() & Chunked(3, start=start)
        padding = Padding(valid.index_fill(1, torch.tensor([0, 1]), 0))
        assert padding.start.tolist() == [2]
        positions = (torch.arange(TOKENS + 2) - 2).clamp(min=0)
        assert_same(layer(left, mask=padding, positions=positions)[:, 2:], expected)


@pytest.mark.parametrize("layer", LAYERS)
def test_left_padded_rows_decode_as_each_alone(layer):
    """A batch whose rows start late, with a cache, token by token."""
    starts = [0, 2]
    layer, x = make(layer), inputs(1, TOKENS)
    batch = torch.cat([torch.cat([x, x[:, :2]], 1), torch.cat([x[:, :2] * 50, x], 1)])
    if "Chunked" in repr(layer):
        layer.mask = Causal() & Chunked(3, start=torch.tensor(starts))
    padding = Padding(torch.arange(TOKENS + 2) >= torch.tensor(starts)[:, None])
    positions = (torch.arange(TOKENS + 2) - torch.tensor(starts)[:, None]).clamp(min=0)
    held, steps = KVCache(), []
    with torch.no_grad():
        for a, b in [(0, 5), *((i, i + 1) for i in range(5, TOKENS + 2))]:
            at = positions[:, a:b]
            steps.append(layer(batch[:, a:b], cache=held, mask=padding, positions=at))
        out = torch.cat(steps, 1)
        if "Chunked" in repr(layer):
            layer.mask = Causal() & Chunked(3)
        expected = layer(x)
    assert_same(out[:1, :TOKENS], expected)
    assert_same(out[1:, 2:], expected)


@pytest.mark.parametrize("layer", LAYERS)
def test_rows_of_a_batch_are_independent(layer):
    """Alone, in another order, next to junk: the same."""
    layer, x = make(layer), inputs(4, TOKENS)
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        whole = layer(x)
        assert_same(layer(x[order]), whole[order])
        for row in range(4):
            assert_same(layer(x[row : row + 1]), whole[row : row + 1])
        x[1:] = 1e6
        assert torch.equal(layer(x)[0], whole[0])


@pytest.mark.parametrize("layer", LAYERS)
def test_the_future_never_changes_a_bit(layer):
    """Tokens after a query are replaced; the query does not notice."""
    layer, x = make(layer), inputs(2, TOKENS)
    other = x.clone()
    other[:, 7:] = inputs(2, TOKENS - 7, seed=5) * 100
    with torch.no_grad():
        assert torch.equal(layer(x)[:, :7], layer(other)[:, :7])
        assert not torch.equal(layer(x)[:, 7:], layer(other)[:, 7:])


@pytest.mark.parametrize("layer", LAYERS)
def test_eval_is_deterministic_and_training_without_dropout_is_eval(layer):
    layer, x = make(layer), inputs(2, TOKENS)
    first = layer(x)
    assert torch.equal(first, layer(x))
    with torch.no_grad():
        assert_same(layer(x), first)
    assert_same(layer.train()(x), first)
    assert_same(layer.eval()(x), first)


def test_dropout_is_for_training():
    x = inputs(2, TOKENS)
    layer = scattered(attention(dropout=0.5)).double()
    assert not torch.equal(layer(x), layer(x))
    torch.manual_seed(0)
    plain = attention().double().eval()
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), plain(x))
    assert torch.equal(layer.weights(x), plain.weights(x))
    assert not torch.equal(layer.train()(x), layer(x))
