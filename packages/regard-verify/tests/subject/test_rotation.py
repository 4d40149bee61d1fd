"""Rotations are found from the scores alone, whatever the scale, and nothing else is called one."""

import pytest
import torch

from projecting import trial
from regard_verify.subject.conventions import Conventions
from regard_verify.subject.probe_weights import probe_rotation
from regard_verify.subject.subject import Subject


def turn(x, pairing, theta):
    """x [B, H, L, D] as complex numbers, each times a power of i."""
    dim = x.shape[-1]
    even, odd = x.chunk(2, -1) if pairing == "halves" else (x[..., ::2], x[..., 1::2])
    frequencies = theta ** (-torch.arange(dim // 2, dtype=torch.float64) * 2 / dim)
    angles = (torch.arange(x.shape[2])[:, None] * frequencies).float()
    cos, sin = angles.cos(), angles.sin()
    parts = (even * cos - odd * sin, even * sin + odd * cos)
    return torch.cat(parts, -1) if pairing == "halves" else torch.stack(parts, -1).flatten(-2)


def probed(change=lambda q, k: (q, k), *, scale=None, bias=0.0, causal=False, **own):
    """What was found out about attention of changed queries and keys."""

    def attend(q, k, v):
        queries, keys = change(q, k)
        scores = queries @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores + (bias(*scores.shape[-2:]) if callable(bias) else bias)
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ v

    conventions = Conventions(causal=causal, window=0, **own)
    subject = Subject("attend", "function", conventions, attend=attend)
    probe_rotation(subject, trial())
    return subject


@pytest.mark.parametrize("pairing", ["halves", "pairs"])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("scale", [None, 1.0, 0.02])
@pytest.mark.parametrize("causal", [False, True])
def test_a_rotation_is_found_with_any_scale(pairing, theta, scale, causal):
    found = probed(
        lambda q, k: (turn(q, pairing, theta), turn(k, pairing, theta)), scale=scale, causal=causal
    )
    assert (found.conventions.pairing, found.conventions.theta) == (pairing, theta)
    assert not found.has.unknown_positions


@pytest.mark.parametrize("pairing", ["halves", "pairs"])
def test_a_declared_base_is_tried_first(pairing):
    found = probed(lambda q, k: (turn(q, pairing, 333.0), turn(k, pairing, 333.0)), theta=333.0)
    assert (found.conventions.pairing, found.conventions.theta) == (pairing, 333.0)


@pytest.mark.parametrize("pairing", ["halves", "pairs"])
@pytest.mark.parametrize(
    "one", [lambda q, k, t: (t(q), k), lambda q, k, t: (q, t(k))], ids=["queries", "keys"]
)
def test_a_rotation_of_one_side_is_a_rotation_with_a_mistake(pairing, one):
    found = probed(lambda q, k: one(q, k, lambda x: turn(x, pairing, 10_000.0)))
    assert found.conventions.pairing == pairing


@pytest.mark.parametrize("scale", [None, 1.0, 0.02])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_without_positions_has_no_rotation(scale, causal):
    found = probed(scale=scale, causal=causal)
    assert found.conventions.pairing == "none"
    assert not found.has.unknown_positions


def distance(queries, keys):
    """ALiBi's: less for keys that are far away."""
    return -0.3 * (torch.arange(queries)[:, None] - torch.arange(keys)).abs()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "other",
    [
        {"bias": distance},
        {"change": lambda q, k: (q, k + torch.arange(k.shape[2])[:, None].sin())},
        {"change": lambda q, k: (turn(q, "halves", 42.0), turn(k, "halves", 42.0))},
    ],
    ids=["ALiBi", "added to keys", "another base"],
)
def test_other_positions_are_no_rotation(other, causal):
    found = probed(causal=causal, **other)
    assert found.conventions.pairing is None
    assert found.has.unknown_positions
    assert "not known" in found.inferred["RoPE"]


@pytest.mark.parametrize("pairing", ["none", "halves"])
def test_a_declared_rotation_is_not_looked_for(pairing):
    found = probed(lambda q, k: 1 / 0, pairing=pairing)
    assert found.conventions.pairing == pairing
