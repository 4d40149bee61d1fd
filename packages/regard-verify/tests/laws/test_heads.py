"""Laws of heads, where each head has parameters of its own."""

import pytest
import torch

from regard_verify import check


def alibi(q, k, v, mixed=False):
    """Scores fall with the distance, by another slope for each head."""
    many = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(many, 1), v.repeat_interleave(many, 1)
    slopes = 2.0 ** -torch.arange(1, q.shape[1] + 1)
    distance = (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])).abs()
    scores = q @ k.mT * q.shape[-1] ** -0.5 - slopes[:, None, None] * distance
    if mixed:
        v = v + 0.5 * v.roll(1, dims=1)
    return scores.softmax(-1) @ v


def mixed(q, k, v):
    return alibi(q, k, v, mixed=True)


LAWS = ["head_permutation", "gqa_order"]


def test_slopes_of_heads_are_no_mixing():
    report = check(alibi, only=LAWS)
    assert report.failed == []
    assert "head_permutation" in {each.law for each in report.having("passed")}


def test_heads_that_mix_are_found_beside_slopes():
    report = check(mixed, {"layout": "BHLD"}, only=LAWS)
    (found,) = [each for each in report.outcomes if each.law == "head_permutation"]
    assert "change a query head that does not read it" in found.example.cause


@pytest.mark.parametrize("subject", [alibi, mixed])
def test_without_a_known_definition_the_slopes_are_not_judged(subject):
    report = check(subject, {"layout": "BHLD"}, only=["oracle_forward"])
    assert [each.status for each in report.outcomes] == ["not applicable"]
