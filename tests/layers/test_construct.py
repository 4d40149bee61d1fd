"""How a layer is built from its arguments, and written back as the code that builds it."""

import pytest
import torch
from torch import nn

from regard import Alibi, Attention, Causal, GroupedQueryAttention, MultiQueryAttention
from regard.layers.construct import (
    build_gate,
    build_norm,
    normed,
    normed_heads,
    size_of_head,
)


@pytest.mark.parametrize(
    "layer",
    [
        Attention(24, 4, num_kv_heads=2, bias={"q_proj"}, mask=Causal()),
        GroupedQueryAttention(24, 4, 2, softcap=5.0, qk_norm="head"),
        MultiQueryAttention(24, 4, score_bias=Alibi.for_heads(4), gate="channel"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_arguments_build_the_layer_again(layer):
    again = type(layer)(**layer.arguments)
    again.load_state_dict(layer.state_dict())
    x = torch.randn(1, 3, 24)
    assert repr(again) == repr(layer)
    assert torch.equal(again(x), layer(x))


def test_the_code_leaves_out_defaults_and_sorts_sets():
    layer = Attention(24, 4, bias={"v_proj", "k_proj"}, num_kv_heads=2, dropout=0.0)
    assert repr(layer) == "Attention(24, 4, num_kv_heads=2, bias={'k_proj', 'v_proj'})"


@pytest.mark.parametrize(("sizes", "size"), [((24, 4, 2, None), 6), ((24, 4, 2, 7), 7)])
def test_heads_share_the_width_or_have_a_size_that_is_given(sizes, size):
    assert size_of_head(*sizes) == size


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (24, 5, 1, None),
            "hidden_size=24 is not a multiple of num_heads=5; choose",
        ),
        (
            (24, 6, 4, None),
            r"num_heads=6 is not .*choose num_kv_heads from \[1, 2, 3, 6",
        ),
        ((24, 4, 2, 0), "head_dim is .*at least 1"),
        ((0, 4, 2, None), "hidden_size is .*at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        size_of_head(*sizes)


@pytest.mark.parametrize(
    ("bias", "out_bias", "expected"),
    [
        (True, None, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (True, False, {"q_proj", "k_proj", "v_proj"}),
        (False, True, {"o_proj"}),
        ({"k_proj"}, None, {"k_proj"}),
        ({"k_proj", "o_proj"}, False, {"k_proj"}),
    ],
)
def test_the_bias_of_the_output_overrules_that_of_all(bias, out_bias, expected):
    layer = Attention(24, 4, bias=bias, out_bias=out_bias)
    assert {name for name, child in layer.named_children() if child.bias is not None} == expected


def test_a_bias_of_no_projection_is_refused():
    with pytest.raises(ValueError, match=r"bias names \['w_proj'\]; choose from"):
        Attention(24, 4, bias={"w_proj", "q_proj"})


def test_a_norm_is_of_a_head_of_the_width_or_user_defined(unchecked):
    assert build_norm(None, 4, 12, 1e-6) is None
    assert build_norm("head", 4, 12, 1e-6).normalized_shape == (4,)
    assert build_norm("width", 4, 12, 1e-6).normalized_shape == (12,)
    assert build_norm(nn.LayerNorm, 4, 12, 1e-6).normalized_shape == (4,)
    for wrong in ("heads", True):
        with pytest.raises(ValueError, match="qk_norm is 'head', 'width', None or a function"):
            build_norm(wrong, 4, 12, 1e-6)


def test_a_norm_runs_in_the_dtype_of_its_weights():
    x = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    norm = nn.RMSNorm(8)
    assert torch.equal(normed(norm, x), norm(x.float()).to(torch.bfloat16))


@pytest.mark.parametrize("width", [False, True])
def test_heads_are_normed_one_by_one_or_together(width):
    flat = torch.randn(2, 3, 12)
    found = normed_heads(nn.RMSNorm(12 if width else 4), flat, 4, width=width)
    mean = flat.square().mean(-1, keepdim=True)
    if not width:
        mean = flat.unflatten(-1, (3, 4)).square().mean(-1).repeat_interleave(4, -1)
    wanted = (flat / (mean + torch.finfo(torch.float32).eps).sqrt()).unflatten(-1, (3, 4))
    torch.testing.assert_close(found, wanted.transpose(1, 2))


def test_a_gate_is_of_heads_or_channels():
    assert build_gate(None, 12, 4, 24) is None
    assert build_gate("head", 12, 4, 24).weight.shape == (4, 12)
    assert build_gate("channel", 12, 4, 24).weight.shape == (24, 12)
    with pytest.raises(ValueError, match="gate is 'head', 'channel' or None, got 'token'"):
        build_gate("token", 12, 4, 24)
