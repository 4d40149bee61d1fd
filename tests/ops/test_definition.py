"""The definition of attention: scores as the papers write them, and a softmax over them."""

import math

import pytest
import torch

from regard import Causal, Span, Where, prepare
from regard.ops.definition import log_sum_exp, scores, softmax


def draw(**options):
    """Two query heads on one key head, three queries and keys; and their call."""
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 4)
    return prepare(q, k, k, backend="eager", **options).call, q, k


def test_scores_are_scaled_products_by_key_head():
    call, q, k = draw(scale=0.5)
    found = scores(call, q, k)
    for h in range(2):
        for i in range(3):
            for j in range(3):
                wanted = 0.5 * sum(q[0, h, i, c] * k[0, 0, j, c] for c in range(4))
                assert found[0, h, i, j].item() == pytest.approx(wanted.item(), abs=1e-6)


def test_the_cap_comes_before_the_bias_and_the_mask():
    bias = torch.randn(1, 2, 3, 3)
    call, q, k = draw(softcap=0.7, score_bias=bias, mask=Causal())
    raw = (q @ k.mT) / 2
    wanted = (0.7 * torch.tanh(raw / 0.7) + bias).masked_fill(
        ~torch.ones(3, 3).tril().bool(), -torch.inf
    )
    torch.testing.assert_close(scores(call, q, k), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_half_precision_are_in_float32(dtype):
    q = torch.randn(1, 1, 2, 4).to(dtype)
    call = prepare(q, q, q, backend="eager").call
    assert scores(call, q, q).dtype == torch.float32


def test_a_sink_takes_its_share():
    call, *_ = draw(sinks=torch.tensor([0.0, math.log(3.0)]))
    zeros = torch.zeros(1, 2, 3, 3)
    assert softmax(call, zeros)[0, 0].flatten().tolist() == pytest.approx([1 / 4] * 9)
    assert softmax(call, zeros)[0, 1].flatten().tolist() == pytest.approx([1 / 6] * 9)


def test_fully_masked_rows_have_weights_and_gradients_of_zero():
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    k = torch.randn(1, 1, 2, 4, requires_grad=True)
    mask, span = Where(lambda b, h, q, kv: (q == 0) & (kv == 1)), Span(0, 3, 0, 2)
    call = prepare(q, k, k, mask=mask, span=span, backend="eager").call
    found = scores(call, q, k)
    weights = softmax(call, found)
    assert weights[0, 0].tolist() == [[0, 1], [0, 0], [0, 0]]
    lse = log_sum_exp(found)
    assert lse[0, 0, 1:].tolist() == [-torch.inf] * 2
    assert lse[0, 0, 0] == found[0, 0, 0, 1]
    (weights.sum() + lse[0, 0, 0]).backward()
    assert q.grad[0, 0, 1:].eq(0).all() and q.grad.isfinite().all()
