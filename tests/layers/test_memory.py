"""Another sequence's keys and values: projected once, for one layer."""

import pickle

import pytest
import torch

from layers import assert_same, inputs, scattered
from regard import Attention, Memory, MultiHeadAttention


def test_a_memory_of_another_layer_is_refused():
    torch.manual_seed(0)
    one, other = (scattered(MultiHeadAttention(12, 4)).double() for _ in range(2))
    x, memory = inputs(2, 3), one.remember(inputs(2, 5, seed=1))
    for each in (memory, memory.reorder(torch.tensor([1, 0]))):
        one(x, context=each)
        with pytest.raises(ValueError, match="remembered by another layer of the same sizes"):
            other(x, context=each)
    assert_same(one(x, context=Memory(memory.k, memory.v)), one(x, context=memory))
    assert pickle.loads(pickle.dumps(memory)).k.shape == memory.k.shape


def test_beams_of_a_memory_belong_to_its_layer():
    layer = scattered(MultiHeadAttention(12, 4)).double()
    context = inputs(2, 5)
    memory = layer.remember(context)
    rows = torch.tensor([1, 1, 0])
    x = inputs(3, 2, seed=1)
    assert_same(layer(x, context=memory.reorder(rows)), layer(x, context=context[rows]))


def test_a_memory_of_no_layer_serves_any():
    k = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    for _ in range(2):
        layer = scattered(MultiHeadAttention(12, 4)).double()
        assert layer(inputs(2, 3), context=Memory(k, k)).shape == (2, 3, 12)


@pytest.mark.parametrize(
    "rows", [torch.tensor([2]), torch.tensor([-1]), torch.tensor([1.0]), torch.tensor([True]), 0]
)
@pytest.mark.usefixtures("unchecked")
def test_rows_that_are_not_there_are_refused(rows):
    memory = Attention(8, 2).remember(torch.randn(2, 3, 8))
    with pytest.raises(ValueError, match="rows"):
        memory.reorder(rows)
