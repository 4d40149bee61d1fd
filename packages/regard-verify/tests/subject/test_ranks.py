"""A context-parallel step runs on real ranks of a gloo group, and is judged as one function."""

import pytest
import torch
from torch import distributed as dist

from regard_verify import Conventions, SubjectError, check, understand
from regard_verify.subject.ranks import OnRanks

LAWS = ["oracle_forward", "convexity", "causality_exact", "visible_set_probe", "self_visible"]


def gathered(x):
    """x of all ranks, one after the other along the tokens."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 2)


def attend(q, k, v, first):
    """Softmax attention; the first query is the token `first`, or nothing is hidden."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if first is not None:
        later = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] + first
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ v


def gathers_keys(q, k, v, is_causal=False):
    first = dist.get_rank() * q.shape[2] if is_causal else None
    return attend(q, gathered(k), gathered(v), first)


def counts_from_its_own_part(q, k, v, is_causal=False):
    return attend(q, gathered(k), gathered(v), 0 if is_causal else None)


def merges(q, k, v, weighted=True):
    """Each rank attends to its own keys; the parts are merged."""
    scores = gathered(q) @ k.mT * q.shape[-1] ** -0.5
    top = scores.amax(-1, keepdim=True)
    dist.all_reduce(top, dist.ReduceOp.MAX)
    powers = (scores - top).exp()
    out, total = powers @ v, powers.sum(-1, keepdim=True)
    if not weighted:
        out, total = out / total, torch.ones_like(total)
    dist.all_reduce(out)
    dist.all_reduce(total)
    return (out / total).chunk(dist.get_world_size(), 2)[dist.get_rank()]


def averages(q, k, v):
    return merges(q, k, v, weighted=False)


def raises_on_one(q, k, v):
    if dist.get_rank() == 1:
        raise ValueError("the second rank is odd")
    return merges(q, k, v)


@pytest.mark.parametrize("function", [gathers_keys, merges])
def test_a_right_step_keeps_the_laws(function):
    report = check(function, {"ranks": 2}, only=LAWS, quick=True)
    assert not report.problem and not report.failed, str(report)
    assert report.named("oracle_forward").status == "passed"
    assert report.inferred["lengths"] == "multiples of 2"


def test_a_wrong_merge_is_named():
    report = check(averages, {"ranks": 2}, only=LAWS, quick=True)
    assert [each.law for each in report.causes] == ["oracle_forward"]
    assert "not merged by their sums of exponentials" in report.causes[0].example.cause


def test_a_causal_rule_counted_from_a_ranks_own_tokens_is_found():
    report = check(counts_from_its_own_part, {"ranks": 2}, only=LAWS, quick=True)
    assert report.causes[0].law == "self_visible", str(report)


def test_what_a_rank_raises_is_told():
    with pytest.raises(SubjectError, match="on rank 1 it raised ValueError: the second rank is od"):
        understand(raises_on_one, Conventions(ranks=2))


def test_three_ranks_give_what_one_gives_and_refuse_odd_lengths():
    whole = torch.randn(3, 1, 2, 6, 4)
    on_ranks = OnRanks(gathers_keys, 3, "BHLD")
    torch.testing.assert_close(on_ranks(*whole, is_causal=True), attend(*whole, 0))
    with pytest.raises(SubjectError, match="7 tokens for 3 ranks"):
        on_ranks(*torch.randn(3, 1, 2, 7, 4))
