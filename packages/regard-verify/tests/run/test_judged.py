"""How much was judged: no green badge without the values and the scale."""

import math

import pytest
import torch
from torch import nn

import stores
from regard_verify import check
from regard_verify.report.report import Outcome, Report
from regard_verify.run.check import unjudged


class ByChannel(nn.Module):
    """One projection, cut as (head_dim, qkv, heads), and a mask of 1 where hidden."""

    def __init__(self, dim=24, num_heads=3):
        super().__init__()
        self.num_heads = num_heads
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, n, c = x.shape
        cut = self.to_qkv(x).reshape(b, n, c // self.num_heads, 3, self.num_heads)
        q, k, v = cut.permute(3, 0, 4, 1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(c // self.num_heads)
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        return self.to_out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


def test_a_projection_cut_by_channel_is_sdpa():
    module, x = ByChannel(), torch.randn(2, 5, 24)
    q, k, v = module.to_qkv(x).unflatten(-1, (8, 3, 3)).permute(3, 0, 4, 1, 2)
    merged = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(x), module.to_out(merged))


def test_a_projection_cut_by_channel_breaks_no_law():
    report = check(ByChannel, quick=True)
    assert report.failed == ["fully_masked_forward", "fully_masked_backward"]  # -inf alone: NaN
    kept = {each.law for each in report.having("passed")}
    assert {"oracle_forward", "scale_closed_form", "mask_polarity", "visible_set_probe"} <= kept
    assert report.inferred["heads"] == "3 query heads, 3 key heads, 8 channels each"
    assert report.unjudged == ""


class Cosines(nn.Module):
    """Weights that no softmax makes, and values that are tanh: no heads are found in it."""

    def __init__(self, dim=12):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        mixed = (q @ k.mT).tanh().mean(-1, keepdim=True) * v.tanh().cumsum(1).flip(1)
        return self.out(mixed.sort(-1).values)


def test_without_heads_it_is_partly_judged():
    report = check(Cosines, quick=True)
    assert not report.problem
    oracle = next(each for each in report.outcomes if each.law == "oracle_forward")
    assert oracle.status == "not applicable"
    assert "values and its scale were not judged" in report.unjudged
    assert "reference=NAME" in report.unjudged
    assert report.failed == []
    assert (report.verdict, report.exit_code) == ("partly judged", 3)
    assert not report
    assert "brightgreen" not in report.badge()


def report_of(kind="module", **statuses):
    outcomes = [Outcome(n, s, "", "exact", reason="no heads") for n, s in statuses.items()]
    return Report("mine", kind, outcomes=outcomes)


@pytest.mark.parametrize(
    ("statuses", "judged"),
    [
        ({"oracle_forward": "passed"}, True),
        ({"oracle_forward": "failed"}, True),
        ({"oracle_forward": "not applicable"}, False),
        ({"oracle_forward": "defect"}, False),
        ({"oracle_forward": "not applicable", "reference_parity": "passed"}, True),
        ({"oracle_forward": "not applicable", "reference_parity": "failed"}, False),
        ({"oracle_forward": "not applicable", "reference_parity": "not applicable"}, False),
    ],
)
def test_what_counts_as_judged(statuses, judged):
    assert (unjudged(report_of(**statuses)) == "") == judged
    assert unjudged(report_of("cache", **statuses)) == ""


def test_the_reason_is_told():
    assert "not judged: no heads. " in unjudged(report_of(oracle_forward="not applicable"))


def test_a_cache_of_an_unknown_kind_is_not_judged(monkeypatch):
    monkeypatch.delattr(stores, "OneLayer")
    monkeypatch.delattr(stores, "Memory")
    report = check(stores.OfUnknownKind, quick=True)
    assert report.failed == []
    assert "steps with a cache were not judged: no cache was found that is taken" in report.unjudged
    assert "cache=. Declare new_cache" in report.unjudged
    assert report.exit_code == 3
    assert check(stores.OfUnknownKind, {"cache": ""}, quick=True).verdict == "kept"
    assert check(stores.Unused, quick=True).verdict == "kept"
