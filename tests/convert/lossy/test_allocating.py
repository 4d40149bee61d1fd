"""Ranks by layer: costs are measured for one layer alone, and the total is spent where it helps."""

import pytest
import torch

from regard.convert import spell_out
from regard.convert.lossy.allocating import allot, costs
from regard.hf import attention_modules, attention_of
from tiny import tiny, tokens


@torch.no_grad()
def test_costs_are_of_one_layer_alone():
    model, text = tiny("llama"), tokens(2, 24)

    def make(index, module, x, size):
        layer = spell_out(attention_of(module))
        layer.v_proj.weight.data = layer.v_proj.weight * (size / 10)
        return layer

    table = costs(model, text, make, [10, 5])
    assert table[:, 0].abs().max() < 1e-6 and table[:, 1].min() > 1e-5
    own_logits = model(text).logits
    other = tiny("llama")
    list(attention_modules(other).values())[1].v_proj.weight.data *= 0.5
    ours, theirs = (logits.log_softmax(-1) for logits in (own_logits, other(text).logits))
    expected = (ours.exp() * (ours - theirs)).sum(-1)[:, ::4].mean()
    assert float(table[1, 1]) == pytest.approx(float(expected), rel=1e-3)


def test_the_allotted_sizes_have_the_least_cost():
    torch.manual_seed(0)
    sizes = [8, 16, 32]
    table = torch.rand(3, 1, dtype=torch.float64) * torch.tensor([4.0, 2.0, 1.0]).double()
    given = allot(table, sizes, 56)
    assert sum(given) == 56 and all(8 <= size <= 32 for size in given)
    weight = table[:, 0] / 4

    def cost(ranks):
        return sum(float(w) * 32 / rank for w, rank in zip(weight, ranks, strict=True))

    every = [
        (a, b, 56 - a - b)
        for a in range(8, 33, 8)
        for b in range(8, 33, 8)
        if 8 <= 56 - a - b <= 32
    ]
    assert cost(given) == pytest.approx(min(map(cost, every)), rel=1e-9)
    assert allot(table, sizes, 24) == [8] * 3 and allot(table, sizes, 96) == [32] * 3
    for total in (23, 97):
        with pytest.raises(ValueError, match="not between 8 and 32 each"):
            allot(table, sizes, total)
