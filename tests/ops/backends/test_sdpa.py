"""torch's own kernel: what it cannot return, and when it needs no dense mask."""

import pytest
import torch

from regard import EVERYTHING, Causal, SlidingWindow, attend, attend_partial


def test_a_part_needs_a_log_sum_exp():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="sdpa gives no log-sum-exp"):
        attend_partial(q, q, q, backend="sdpa")


@pytest.mark.parametrize("mask", [EVERYTHING, Causal(), Causal() & SlidingWindow(3)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_the_definition(mask, dtype):
    q, k, v = (torch.randn(2, heads, 7, 8).to(dtype) for heads in (4, 2, 2))
    found, wanted = (attend(q, k, v, mask=mask, backend=each) for each in ("sdpa", "eager"))
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, wanted, rtol=rounding, atol=rounding)


def test_a_causal_mask_of_the_same_tokens_is_never_dense(monkeypatch):
    given = []
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *tensors, **options: given.append(options) or kernel(*tensors, **options),
    )
    q = torch.randn(1, 2, 5, 8)
    attend(q, q, q, mask=Causal(), backend="sdpa")
    attend(q, q, q, mask=Causal() & SlidingWindow(2), backend="sdpa")
    causal, window = given
    assert causal.get("is_causal") and causal.get("attn_mask") is None
    assert window["attn_mask"].shape[-2:] == (5, 5)


def test_values_may_be_wider_or_narrower_than_keys():
    q = torch.randn(1, 2, 5, 8)
    for width in (3, 16):
        v = torch.randn(1, 2, 5, width)
        found, wanted = (attend(q, q, v, backend=each) for each in ("sdpa", "eager"))
        torch.testing.assert_close(found, wanted)
