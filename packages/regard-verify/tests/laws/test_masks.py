"""Masks beside the causal rule, switches for it, and a second mask: right ones break no law."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mutants import defects
from mutants.defects import How, variant
from regard_verify import check

LAWS = ["mask_and_causal", "causal_option", "every_mask_argument", "mask_polarity"]


def statuses(report):
    assert not report.problem, report.problem
    return {each.law: each.status for each in report.outcomes}


def test_right_modules_with_two_masks_and_a_causal_option():
    optional = statuses(check(defects.Attention, only=LAWS))
    assert optional == {**dict.fromkeys(LAWS, "passed"), "mask_and_causal": "not applicable"}
    causal = statuses(check(variant(How(), causal=True), only=LAWS))
    assert causal == {**dict.fromkeys(LAWS, "passed"), "causal_option": "not applicable"}


def test_a_mask_that_switches_causality_off_is_not_called_ignored():
    report = check(variant(How(causal_unless_masked=True), causal=True), quick=True)
    (cause,) = report.causes
    assert cause.law == "mask_and_causal"
    assert cause.example.cause == "A mask switches the causal rule off: only the mask is obeyed."
    assert {"mask_polarity", "visible_set_probe", "oracle_forward"} < set(report.failed)
    assert not any("mask is ignored" in str(each.example) for each in report.outcomes)


class WithoutHeads(nn.Module):
    """Causal, and its projections are no submodules: the laws of whole layers apply."""

    off = False

    def __init__(self, width=16):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, width, width) / 4)
        self.width = width

    def forward(self, x, mask=None):
        q, k, v = (x @ w for w in self.weight)
        keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if mask is not None:
            keep = mask if self.off else keep & mask
        return F.scaled_dot_product_attention(q, k, v, keep)


class SwitchedOff(WithoutHeads):
    off = True


def test_a_mask_that_switches_causality_off_in_a_layer():
    right = check(WithoutHeads(), {"width": 16}, only=LAWS[:1])
    assert statuses(right) == {"mask_and_causal": "passed"}
    wrong = check(SwitchedOff(), {"width": 16}, only=LAWS)
    assert [each.law for each in wrong.causes] == ["mask_and_causal"]
    assert wrong.causes[0].example.cause.startswith("A mask switches the causal rule off")


class CausalInTheCall(nn.Module):
    def __init__(self, embed_dim=32, num_heads=4, ignored=False):
        super().__init__()
        self.num_heads, self.ignored = num_heads, ignored
        self.qkv, self.out = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x, causal=False):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        causal = causal and not self.ignored
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                        .transpose(1, 2).flatten(2))  # fmt: skip


def test_a_causal_argument_of_a_modules_call_is_used_where_it_works():
    names = ["causality_exact", "causal_option"]
    right = check(CausalInTheCall(), only=names)
    assert statuses(right) == dict.fromkeys(names, "passed")
    wrong = check(CausalInTheCall(ignored=True), only=names)
    assert statuses(wrong) == {"causal_option": "failed", "causality_exact": "not applicable"}
    assert "the causal rule is ignored" in wrong.causes[0].example.cause


def test_an_ignored_second_mask_is_named():
    report = check(variant(How(ignores="key_padding_mask")), only=["every_mask_argument"])
    (cause,) = report.causes
    assert "no form of key_padding_mask hides a key" in cause.example.cause


def one_of_two(q, k, v, attn_mask=None, key_padding_mask=None):
    """The second mask replaces the first."""
    keep = attn_mask
    if key_padding_mask is not None:
        keep = ~key_padding_mask[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, keep)


def both(q, k, v, attn_mask=None, key_padding_mask=None):
    keep = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    if attn_mask is not None:
        keep = keep & attn_mask
    if key_padding_mask is not None:
        keep = keep & ~key_padding_mask[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, keep)


@pytest.mark.parametrize(("subject", "status"), [(both, "passed"), (one_of_two, "failed")])
def test_two_masks_of_a_function(subject, status):
    report = check(subject, only=["every_mask_argument"])
    assert statuses(report) == {"every_mask_argument": status}


class TwoMasks(nn.Module):
    """A mask of tokens, and one of queries by keys for all rows; `rows` are those of the first."""

    def __init__(self, width=16, rows=None):
        super().__init__()
        self.rows, self.heads = rows, 4
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, attn_mask=None, key_padding_mask=None):
        q, k, v = (w(x).unflatten(-1, (4, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        keep = keep if attn_mask is None else keep & attn_mask
        if key_padding_mask is not None:
            keep = keep & ~key_padding_mask[:, None, None, :][: self.rows]
        return self.out(F.scaled_dot_product_attention(q, k, v, keep).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("rows", "status"), [(None, "passed"), (1, "failed")])
def test_a_second_mask_is_of_each_row(rows, status):
    (found,) = check(TwoMasks(rows=rows), only=["every_mask_argument"]).outcomes
    assert found.status == status
    assert rows is None or "key_padding_mask" in found.example.shape


class MaskOfTokensFirst(TwoMasks):
    def forward(self, x, mask=None, attn_mask=None):
        assert attn_mask is None or attn_mask.ndim == 2
        return super().forward(x, attn_mask, None if mask is None else ~mask)


def test_a_second_mask_may_be_one_for_all_rows():
    (found,) = check(MaskOfTokensFirst(), only=["every_mask_argument"]).outcomes
    assert found.status == "passed", found.example
