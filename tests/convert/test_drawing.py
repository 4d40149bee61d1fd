"""Tokens are drawn as often as their weights say, and none that has no weight."""

import pytest
import torch

from regard.convert.drawing import drawn


def test_tokens_are_drawn_in_proportion_to_their_weights():
    weights, chance = torch.tensor([0.0, 1.0, 0.0, 5.0, 2.0, 0.0]), torch.Generator().manual_seed(0)
    found = drawn(weights.expand(40_000, -1), chance)
    assert found.shape == (40_000, 1)
    counts = found.flatten().bincount(minlength=6)
    assert counts[weights == 0].eq(0).all()
    expected = 40_000 * weights / weights.sum()
    deviations = (counts - expected) / (expected * (1 - weights / weights.sum())).sqrt().clamp_min(
        1
    )
    assert deviations.abs().max() < 4  # standard deviations


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_another_default_dtype_draws_as_many_tokens(dtype):
    before, weights = torch.get_default_dtype(), torch.ones(4000, 1000)
    wanted = drawn(weights, torch.Generator().manual_seed(0))
    torch.set_default_dtype(dtype)
    try:
        found = drawn(weights, torch.Generator().manual_seed(0))
    finally:
        torch.set_default_dtype(before)
    assert found.equal(wanted) and len(found.unique()) > 900


def test_each_row_has_its_own_weights_and_the_seed_decides():
    rows = torch.eye(7, dtype=torch.bfloat16)
    assert drawn(rows, torch.Generator().manual_seed(1)).flatten().tolist() == list(range(7))
    some = torch.rand(50, 30)
    one, other, third = (drawn(some, torch.Generator().manual_seed(n)) for n in (1, 1, 2))
    assert one.equal(other) and not one.equal(third)


def test_no_token_behind_the_last_with_a_weight_is_drawn(monkeypatch):
    """A share that rounds to 1."""
    monkeypatch.setattr(torch, "rand", lambda *sizes, **given: torch.ones(*sizes))
    weights = torch.tensor([[0.25, 0.5, 0.0], [3.0, 0.0, 0.0]])
    assert drawn(weights, torch.Generator()).flatten().tolist() == [1, 0]
