"""The law of latent positions: the shared channels are rotated as queries and keys are."""

import pytest
import torch
from torch import nn

from projecting import by_head, right
from regard_verify import check

HEADS, DIM, ROPE = 3, 4, 4


def turn(x, first=0, theta=10_000.0):
    """Neighbours in pairs; x [B, H, L, 4]."""
    pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (2, 2)))
    frequencies = theta ** (-torch.arange(2) / 2)
    angles = (first + torch.arange(x.shape[2]))[:, None] * frequencies
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


class Latent(nn.Module):
    """Keys and values from one latent; 4 channels of the keys are shared, and alone are rotated."""

    def __init__(self, queries=turn, keys=turn):
        super().__init__()
        self.queries, self.keys, self.num_heads = queries, keys, HEADS
        self.down, self.to_q = nn.Linear(12, 5 + ROPE), nn.Linear(12, HEADS * (DIM + ROPE))
        self.up, self.out = nn.Linear(5, 2 * HEADS * DIM), nn.Linear(HEADS * DIM, 12)

    def forward(self, x):
        latent, shared = self.down(x).split([5, ROPE], -1)
        k, v = by_head(self.up(latent), HEADS).chunk(2, -1)
        q, own = by_head(self.to_q(x), HEADS).split([DIM, ROPE], -1)
        shared = self.keys(shared[:, None]).expand(-1, HEADS, -1, -1)
        q, k = torch.cat([q, self.queries(own)], -1), torch.cat([k, shared], -1)
        return self.out(right(q, k, v).transpose(1, 2).flatten(2))


def judged(module, **like):
    (outcome,) = check(module, {"width": 12, **like}, only=["latent_positions"]).outcomes
    return outcome.status, outcome.example.cause if outcome.example else outcome.reason


def plain(x):
    return x


@pytest.mark.parametrize("pair", [(turn, turn), (plain, plain)])
def test_shared_channels_that_are_rotated_alike_keep_the_law(pair):
    status, why = judged(Latent(*pair))
    assert status == "passed", why


@pytest.mark.parametrize(
    ("queries", "keys", "words"),
    [
        (turn, plain, "the queries are rotated, and the keys are not"),
        (plain, turn, "the keys are rotated, and the queries are not"),
        (lambda x: turn(x, 1), turn, "the queries are rotated by one position too many"),
    ],
)
def test_shared_channels_that_are_not_break_it(queries, keys, words):
    status, cause = judged(Latent(queries, keys))
    assert status == "failed"
    assert words in cause.lower()


def test_other_positions_are_not_judged():
    def other(x):
        return turn(x, theta=42.0)

    status, reason = judged(Latent(other, other))
    assert status == "not applicable"
    assert "not known" in reason


@pytest.mark.parametrize("theta", [10_000.0, 5e5])
@pytest.mark.parametrize("made", [turn, plain])
def test_a_declared_base_of_the_rotation_is_a_law(made, theta):
    right = made is turn and theta == 10_000.0
    status, cause = judged(Latent(made, made), theta=theta)
    assert status == ("passed" if right else "failed")
    assert right or "another base of RoPE is declared" in cause
