"""The kernels of a step over a joint latent: attention over keys that are rebuilt by definition."""

import pytest
import torch

pytest.importorskip("numba")

from regard.ops.kernels.latent_stepping import LatentPlan
from regard.ops.kernels.tiles import Latents
from regard.rope import Rotary

HEADS, KV_HEADS, WIDTH, RANK, ROOM = 4, 2, 32, 48, 702
ROPE = Rotary(WIDTH)


def drawn(dtype, held, batch=2, rank=RANK):
    """The arguments of a step after so many tokens, which are at every second position."""
    torch.manual_seed(0)
    where = (2 * torch.arange(held + 1)).expand(batch, -1) + 5 * torch.arange(batch)[:, None]
    return {
        "q": torch.randn(batch, HEADS, 1, WIDTH).to(dtype),
        "latent": torch.randn(batch, 1, 1, rank).to(dtype),
        "held": torch.randn(batch, 1, ROOM, rank).to(dtype),
        "length": held,
        "keys": Latents(
            (torch.randn(KV_HEADS, WIDTH, rank) / 7).to(dtype),
            where.to(torch.int32)[:, None, :, None].contiguous(),
            *ROPE._table(where),
        ),
        "scale": 0.3,
    }


def plan_of(dtype, batch=2, rank=RANK):
    return LatentPlan.of(dtype, batch, HEADS, KV_HEADS, WIDTH, rank, WIDTH)


def sums_of_latents(q, latent, held, length, keys, scale):
    """By definition, in float64."""
    tokens = torch.cat([held[:, :, :length], latent], 2).double()
    where = keys.positions[:, 0, :, 0].long()
    rebuilt = ROPE.rotate(tokens @ keys.weights.double().mT, where)
    turned = ROPE.rotate(q, where[:, -1:]).double().unflatten(1, (KV_HEADS, -1)).squeeze(3)
    weights = (scale * turned @ rebuilt.mT).softmax(-1)
    return (weights @ tokens).flatten(1, 2).unsqueeze(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [0, 1, 30, 700])
@pytest.mark.parametrize(("threads", "rank"), [(1, RANK), (2, RANK), (2, 46), (1, 41)])
def test_a_step_is_attention_over_rebuilt_keys(dtype, length, threads, rank):
    torch.set_num_threads(threads)
    given = drawn(dtype, length, rank=rank)
    before, wanted = given["held"].clone(), sums_of_latents(**given)
    found = plan_of(dtype, rank=rank).run(**given)
    assert found.dtype is torch.float32 and found.shape[-1] == rank
    latents = given["held"][:, :, : length + 1].double()
    keys = latents @ given["keys"].weights.double().mT
    largest = 0.3 * given["q"].double().abs().sum(-1).amax() * keys.abs().amax()
    bound = 2 * 2**-24 * (1 + largest) * latents.abs().amax()  # nothing is rounded to bfloat16
    assert (found - wanted).abs().amax() <= bound
    assert given["held"][:, :, length : length + 1].equal(given["latent"])
    before[:, :, length] = given["latent"][:, :, 0]
    assert given["held"].equal(before)


def test_latents_are_whole_vectors_or_followed_by_others():
    """A row of 46 numbers is read as 48, and nothing may lie behind the last row of a buffer."""
    for rank, runs in ((RANK, True), (46, False)):
        given = drawn(torch.float32, ROOM - 1, rank=rank)
        assert (plan_of(torch.float32, rank=rank).run(**given) is not None) is runs


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", strided),
        ("q", lambda x: x[:1]),
        ("latent", lambda x: x.double()),
        ("latent", lambda x: x.expand(2, 2, 1, RANK)),
        ("held", lambda x: x[:, :, :30]),  # no room
        ("held", lambda x: x.mT.contiguous().mT),
        ("held", lambda x: x[:, :, :40].to("meta")),
    ],
)
def test_nothing_is_written_where_a_tensor_lies_otherwise(name, change):
    given = drawn(torch.float32, 30)
    before = given["held"].clone()
    assert plan_of(torch.float32).run(**{**given, name: change(given[name])}) is None
    assert given["held"].equal(before)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("positions", lambda x: x.long()),
        ("positions", lambda x: x[:, :, 1:]),
        ("weights", lambda x: x[:1]),
        ("weights", lambda x: x.bfloat16()),
        ("weights", lambda x: x.mT),
    ],
)
def test_nor_where_the_source_of_the_keys_does(name, change):
    given = drawn(torch.float32, 30)
    before, keys = given["held"].clone(), given["keys"]
    given["keys"] = keys._replace(**{name: change(getattr(keys, name))})
    assert plan_of(torch.float32).run(**given) is None
    assert given["held"].equal(before)
