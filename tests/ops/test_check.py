"""What a call may not be: each refusal states the rule, the values that came, and the way out."""

import pytest
import torch

from regard import Causal, Dense, Padding
from regard.ops.check import check_mask, check_options, check_sinks, check_tensors, divisors

Q = torch.randn(2, 4, 3, 8)


def test_divisors_are_in_order():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]


@pytest.mark.parametrize(
    ("k", "v", "error", "message"),
    [
        (None, Q, TypeError, r"k is a tensor \[B, heads, length, width\], got NoneType"),
        (Q[0], Q, ValueError, r"k is \[B, heads, length, width\], got shape \(4, 3, 8\)"),
        (Q.long(), Q, ValueError, "k is floating point, got torch.int64; cast it first"),
        (Q.double(), Q, ValueError, "one dtype, got q torch.float32, k torch.float64"),
        (Q.to("meta"), Q.to("meta"), ValueError, "one device, got q cpu, k meta"),
        (Q[:1], Q[:1], ValueError, "one batch size, got 2, 1 and 1"),
        (Q, Q[:, :, :2], ValueError, "the same heads and keys"),
        (Q[..., :7], Q, ValueError, "one head dim, got 8 and 7; only v may differ"),
        (Q[:, :3], Q[:, :3], ValueError, r"4 heads of q .* 3 of k and v; .*\[1, 2, 4\]"),
        (Q.to_sparse(), Q, ValueError, r"give k.to_dense\(\)"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(unchecked, k, v, error, message):
    with pytest.raises(error, match=message):
        check_tensors(Q, k, v)


def test_tensors_that_belong_together_pass():
    check_tensors(Q, Q[:, :2], Q[:, :2, :, :5])
    check_tensors(Q[:0], Q[:0], Q[:0])


@pytest.mark.parametrize("mask", [torch.ones(3, 3).bool(), None, "causal"])
def test_a_mask_is_a_rule(unchecked, mask):
    with pytest.raises(TypeError, match="mask is a"):
        check_mask(mask)


def test_rules_pass():
    for mask in (Causal(), Dense(torch.ones(3, 3).bool()) & Padding(torch.ones(1, 3).bool())):
        check_mask(mask)


OPTIONS = {"dropout": 0.0, "softcap": None, "precision": "strict", "scale": None}


@pytest.mark.parametrize(
    "wrong",
    [
        {"dropout": 1.5},
        {"dropout": -0.1},
        {"softcap": 0.0},
        {"precision": "exact"},
        {"scale": 1e39},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(unchecked, wrong):
    check_options(**OPTIONS)
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        check_options(**{**OPTIONS, **wrong})


def test_sinks_are_one_for_each_head(unchecked):
    check_sinks(None, Q)
    check_sinks(torch.zeros(4), Q)
    with pytest.raises(ValueError, match="sinks"):
        check_sinks(torch.zeros(3), Q)
