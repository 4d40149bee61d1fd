"""Merging against the softmax over everything, in closed form."""

import math

import pytest
import torch

from regard import Partial, merge


def part(out, lse):
    return Partial(torch.tensor([[[[out]]]]), torch.tensor([[[lse]]]))


def test_merging_weighs_by_the_sums_of_exponentials():
    merged = merge(part(1.0, math.log(1.0)), part(5.0, math.log(3.0)))
    assert merged.out.item() == pytest.approx(4.0)
    assert merged.lse.item() == pytest.approx(math.log(4.0))


def test_order_and_grouping_do_not_matter():
    parts = [
        Partial(torch.randn(2, 3, 4, 5).double(), torch.randn(2, 3, 4).double() * 30)
        for _ in range(4)
    ]
    a, b, c, d = parts
    whole = merge(*parts)
    for other in (merge(d, b, a, c), merge(merge(a, b), merge(c, d)), merge(a, merge(b, c, d))):
        assert torch.allclose(other.out, whole.out, atol=1e-14)
        assert torch.allclose(other.lse, whole.lse, atol=1e-13)


def test_nothing_changes_nothing():
    only = part(2.0, -700.0)
    for merged in (merge(only, Partial.nothing()), merge(Partial.nothing(), only), merge(only)):
        assert merged.out.item() == 2.0
        assert merged.lse.item() == pytest.approx(-700.0)
    empty = merge(Partial.nothing(), Partial.nothing())
    assert empty.out.item() == 0.0
    assert empty.lse.item() == -math.inf


def test_a_sink_takes_its_share():
    merged = merge(part(3.0, 0.0), Partial.of_sinks(torch.tensor([math.log(2.0)])))
    assert merged.out.item() == pytest.approx(1.0)


def test_merging_has_gradients_where_a_part_is_empty():
    out = torch.ones(1, 1, 2, 1, dtype=torch.float64, requires_grad=True)
    lse = torch.tensor([[[0.3, -math.inf]]], dtype=torch.float64, requires_grad=True)
    merged = merge(Partial(out, lse), Partial(2 * out, lse.detach()))
    (merged.out.sum() + merged.lse[0, 0, 0]).backward()
    assert torch.isfinite(out.grad).all()
    assert torch.isfinite(lse.grad).all()
    assert out.grad[0, 0].flatten().tolist() == pytest.approx([1.5, 0.0])


def test_merging_none_is_an_error():
    with pytest.raises(ValueError, match="nothing"):
        merge()
