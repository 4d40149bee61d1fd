"""What a call may not be: each refusal states the rule, the values that came, and the way out."""

import pytest
import torch
from torch.nested import nested_tensor

from regard import Alibi, Causal, Dense, Padding, RelativeBias, attend
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
        (nested_tensor([*Q], layout=torch.jagged), Q, ValueError, r"to_padded_tensor\(k, 0.0\)"),
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


class Rule:
    def __init__(self, function):
        self.function = function

    def bias(self, span, *, device=None, dtype):
        return self.function(span)


@pytest.mark.parametrize("backend", ["auto", "eager", "flex"])
@pytest.mark.parametrize(
    ("score_bias", "message"),
    [
        (Alibi([0.5] * 3), "is for 3 heads, the call has 4 query heads"),
        (RelativeBias(5).requires_grad_(False), "is for 5 heads, the call has 4 query heads"),
        (Rule(lambda span: torch.zeros(3, 3)), r"broadcasts to .* \[1, 4, 5, 5\], got .* \[3, 3\]"),
        (Rule(lambda span: torch.zeros(1, 4, 5, 3)), r"broadcasts to .*, got .* \[1, 4, 5, 3\]"),
        (Rule(lambda span: None), "returned NoneType, not a tensor"),
        (Rule(lambda span: span.batch), r"raised AttributeError .*a rule has bias\(span, \*"),
    ],
)
def test_rules_that_do_not_fit_the_call_are_a_sentence(score_bias, message, backend):
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises((ValueError, TypeError), match=f"score_bias=.*{message}"):
        attend(q, q, q, score_bias=score_bias, backend=backend)


def test_a_rule_of_one_head_is_for_every_number():
    q = torch.randn(1, 4, 5, 8)
    one, each = (attend(q, q, q, score_bias=Alibi(n * [0.5])) for n in (1, 4))
    assert one.equal(each)


def test_sinks_are_a_tensor():
    with pytest.raises(TypeError, match=r"sinks are a tensor \[2\], got list"):
        check_sinks([0.0, 0.0], torch.randn(1, 2, 3, 8))
