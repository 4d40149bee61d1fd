"""Keys that the decoding kernel computes from latents, against keys in float64."""

import pytest
import torch

from covering import few

pytest.importorskip("numba")

from regard import Rotary
from regard.ops.kernels.launching import decode, has_beyond
from regard.ops.kernels.tiles import Latents

BATCH, GROUPS, WIDTH, SCALE = 2, 3, 32, 0.4


def case(rank, rotated, dtype, keys=331, rows=3):
    """Queries, latents, what keys are computed from, and the keys in float64."""
    chance = torch.Generator().manual_seed(rank + keys)
    q = torch.randn(BATCH, GROUPS, rows, WIDTH, generator=chance).to(dtype)
    stored = torch.randn(BATCH, 1, keys + 9, rank, generator=chance).to(dtype)[:, :, :keys]
    weights = (torch.randn(GROUPS, WIDTH, rank, generator=chance) / rank**0.5).to(dtype)
    positions = torch.randint(500, (BATCH, 1, keys, 1), generator=chance, dtype=torch.int32)
    table = torch.empty(1, 0), torch.empty(1, 0)
    k = stored.double() @ weights.double().mT
    if rotated:
        table = Rotary(rotated)._table(positions)
        turns = positions[:, 0].double() * 10_000.0 ** -(torch.arange(0, rotated, 2) / rotated)
        one, other = (x.clone() for x in k[..., :rotated].chunk(2, -1))
        cos, sin = turns.cos()[:, None], turns.sin()[:, None]
        k[..., :rotated] = torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
    return q, stored.expand(-1, GROUPS, -1, -1), Latents(weights, positions, *table), k


def wanted(q, k, v, bias=None):
    scores = SCALE * q.double() @ k.mT
    scores = scores if bias is None else scores + bias
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


def check(q, stored, latents, k, tolerance, **options):
    out, lse = decode(q, stored, stored, scale=SCALE, latents=latents, **options)
    right, right_lse = wanted(q, k, stored, options.get("bias"))
    torch.testing.assert_close(out.double(), right, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), right_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("lanes", "rotated"), few([(16, 32), (8, 16), (4, 0)], 2))
def test_keys_are_products_and_rotated(lanes, rotated):
    check(*case(48, rotated, torch.float32), 2e-5, lanes=lanes)


@pytest.mark.parametrize("keys", [1, 3, 4, 5, 64, 66])
def test_any_number_of_keys(keys):
    check(*case(48, 16, torch.float32, keys), 2e-5, lanes=8)


@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize(
    ("rank", "dtype"), [(17, torch.float32), (33, torch.bfloat16), (50, torch.bfloat16)]
)
def test_latents_of_any_rank_are_read_in_whole_vectors(rank, spare, dtype):
    """Without memory behind the last latent, a copy is read."""
    q, stored, latents, k = case(rank, 32, dtype)
    if not spare:
        stored = stored[:, :1].clone().expand(-1, GROUPS, -1, -1)
    assert has_beyond(stored, 7) is spare
    check(q, stored, latents, k, 2e-5)


@pytest.mark.parametrize("rank", [16, 48, 64])
@pytest.mark.parametrize("lanes", [None, 8])  # pairs are multiplied in vectors of 16
def test_nothing_is_rounded_to_half_precision(rank, lanes):
    """Neither keys nor weights of the softmax."""
    q, stored, latents, k = case(rank, 32, torch.bfloat16)
    bias = torch.randn(BATCH, GROUPS, 3, 331).masked_fill(torch.rand(331) < 0.3, -torch.inf)
    check(q, stored, latents, k, 2e-5, bias=bias, lanes=lanes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.zeros(BATCH, 1, 330, 1, dtype=torch.int32)}, "positions must be"),
        ({"positions": torch.zeros(BATCH, 1, 331, 1, dtype=torch.int64)}, "positions must be"),
        ({"weights": torch.zeros(GROUPS, WIDTH, 40)}, "weights must be"),
        ({"cos": torch.zeros(9, 48), "sin": torch.zeros(9, 48)}, "rotated channels"),
    ],
)
def test_other_tensors_do_not_reach_the_kernel(change, message):
    q, stored, latents, _ = case(48, 16, torch.float32)
    with pytest.raises(AssertionError, match=message):
        decode(q, stored, stored, scale=SCALE, latents=latents._replace(**change), lanes=8)
