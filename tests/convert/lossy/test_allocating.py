"""Ranks by layer: the directions that cost most stay."""

import itertools

import pytest
import torch

from layers import WIDTH, attention, scattered
from regard.convert import latentize
from regard.convert.lossy.allocating import allot
from regard.convert.lossy.latentize import energies_of


def test_the_ranks_leave_out_the_least():
    costs = [each.sort(descending=True).values for each in torch.rand(3, 6).double()]

    def lost(ranks):
        return sum(float(each[rank:].sum()) for each, rank in zip(costs, ranks, strict=True))

    ranks = allot(costs, 4)
    every = [each for each in itertools.product(range(1, 7), repeat=3) if sum(each) == 12]
    assert sum(ranks) == 12 and lost(ranks) == pytest.approx(min(map(lost, every)))


def test_every_layer_keeps_a_quarter_of_the_mean():
    costs = [torch.zeros(16).double(), torch.ones(16).double()]
    assert allot(costs, 8) == [2, 14]
    assert allot(costs, 16) == [16, 16]
    with pytest.raises(ValueError, match="mean rank 17 have 34 directions, of which are 32"):
        allot(costs, 17)


@torch.no_grad()
def test_energies_are_those_that_a_latent_of_each_rank_loses():
    layer = scattered(attention(2, num_kv_heads=1)).double()
    x = torch.randn(3, 9, WIDTH, dtype=torch.float64)
    energies = energies_of(layer, x)
    for rank in (1, 3):
        lost = latentize(layer, rank=rank, covariance=torch.eye(WIDTH), inputs=x).lost
        assert lost == pytest.approx(float(energies[rank:].sum() / energies.sum()), abs=1e-9)
