"""Attention as a function: shapes, dtypes, its own span, and calls that are refused."""

import math

import pytest
import torch
import torch.nn.functional as F

from regard import Causal, Padding, Span, attend, attend_partial, merge, prepare
from regard.masks import EVERYTHING


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_torchs_own(kv_heads):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, kv_heads, 5, 8)
    v = torch.randn(2, kv_heads, 5, 8)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, mask=Causal()), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_output_has_the_width_of_values_and_the_dtype_of_inputs(dtype):
    q, k, v = (torch.randn(2, 2, n, w).to(dtype) for n, w in ((3, 8), (5, 8), (5, 6)))
    out = attend(q, k, v, span=Span(2, 5, 0, 5))
    assert out.shape == (2, 2, 3, 6)
    assert out.dtype == dtype
    partial = attend_partial(q, k, v, span=Span(2, 5, 0, 5))
    assert partial.out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_equal_scores_are_the_mean_of_the_values():
    q, v = torch.zeros(1, 1, 2, 4), torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
    assert attend(q, q, v).flatten().tolist() == [2.0, 2.0]
    assert attend(q, q, v, mask=Causal()).flatten().tolist() == [1.0, 2.0]
    sinks = torch.tensor([math.log(2.0)])
    assert attend(q, q, v, sinks=sinks).flatten().tolist() == pytest.approx([1.0, 1.0])


def test_parts_merge_to_the_whole():
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    parts = [
        attend_partial(q, k[:, :, a:b], v[:, :, a:b], mask=Causal(), span=Span(0, 4, a, b))
        for a, b in ((0, 1), (1, 4))
    ]
    torch.testing.assert_close(merge(*parts).out, attend(q, k, v, mask=Causal()))


def test_without_a_span_as_many_queries_as_keys_are_the_same_tokens():
    q = torch.randn(1, 1, 3, 4)
    assert prepare(q, q, q, mask=Causal()).span == Span(0, 3, 0, 3)
    longer = torch.randn(1, 1, 5, 4)
    with pytest.raises(ValueError, match="span"):
        attend(q, longer, longer, mask=Causal())
    valid = torch.tensor([[True] * 4 + [False]])
    assert attend(q, longer, longer, mask=Padding(valid)).shape == q.shape


def test_a_span_of_other_lengths_is_refused():
    q, k = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"q has 2 queries where span=.* holds 1"):
        attend(q, k, k, span=Span(2, 3, 0, 3))
    with pytest.raises(ValueError, match=r"k has 3 keys where span=.* holds 4"):
        attend(q, k, k, span=Span(2, 4, 0, 4))


def test_preparing_computes_nothing():
    q = torch.empty(1, 2, 3, 4, device="meta")
    prepared = prepare(q, q, q, mask=Causal())
    assert prepared.call.num_heads == 2
    assert prepared.backend.objection(prepared.call) is None


@torch.no_grad()
def test_a_mask_of_none_hides_nothing():
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    assert torch.equal(attend(q, k, v, mask=None), attend(q, k, v))
    assert prepare(q, k, v, mask=None).mask is EVERYTHING
    assert torch.equal(attend_partial(q, k, v, mask=None).out, attend_partial(q, k, v).out)
