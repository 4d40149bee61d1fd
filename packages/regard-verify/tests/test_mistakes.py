"""Each mistake changes the output, and is what its sentence says: as plain numpy computes it."""

import numpy as np
import pytest
import torch

from regard_verify.mistakes import AVERAGED, SENTENCES, heads_of, mistakes, turned
from regard_verify.oracle import pattern

SCALE = 0.4
TURNED = ("halves", "pairs")


def heads(*, groups=3, keys=5, dim=4, width=4, causal=True):
    """3 query heads over `keys` tokens of 2 rows."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 3, 5, dim), (2, groups, keys, dim), (2, groups, keys, width))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return heads_of(q, k, v, pattern(5, keys, causal=causal), SCALE)


def softmax(scores, axis=-1):
    powers = np.exp(scores)
    return powers / powers.sum(axis, keepdims=True)


def plain(q, k, v, keep, scale=SCALE):
    """Attention [B, H, L, D] in numpy."""
    scores = np.where(keep, scale * np.einsum("bhid,bhjd->bhij", q, k), -np.inf)
    return softmax(scores) @ v


def split_by_a_view(x):
    """The cells of [B, L, H * D], in their order, as [B, H, L, D]."""
    batch, many, length, dim = x.shape
    return x.transpose(0, 2, 1, 3).ravel().reshape(batch, many, length, dim)


def merged_by_a_view(x):
    """The cells of [B, H, L, D], in their order, as [B, L, H * D]: here cut into heads again."""
    batch, many, length, dim = x.shape
    return x.ravel().reshape(batch, length, many, dim).transpose(0, 2, 1, 3)


def all_scores(q, k, keep):
    return np.where(keep, SCALE * np.einsum("bhid,bhjd->bhij", q, k), -np.inf)


def without(keep, key):
    keep = keep.copy()
    keep[..., key] = False
    return keep


def over_queries(q, k, v, keep):
    return softmax(all_scores(q, k, keep), -2) @ v


def over_heads(q, k, v, keep):
    powers = np.where(keep, np.exp(SCALE * np.einsum("bhid,bhjd->bhij", q, k)), 0.0)
    return powers / powers.sum(1, keepdims=True).clip(1e-300) @ v


def masked_late(q, k, v, keep):
    return (softmax(all_scores(q, k, True)) * keep) @ v


def over_heads_with_hidden(q, k, v, keep):
    scores = np.where(keep, SCALE * np.einsum("bhid,bhjd->bhij", q, k), -1e30)
    return softmax(scores - scores.max(1, keepdims=True), 1) @ v


WOULD = {  # the output [B, H, L, D] for q, k, v and what is visible
    "the softmax runs over the queries": over_queries,
    "the softmax runs over the heads": over_heads,
    "the softmax runs over the heads, hidden keys among them": over_heads_with_hidden,
    "there is no softmax: the scores are the weights": lambda q, k, v, keep: (
        np.where(keep, SCALE * q @ k.swapaxes(-1, -2), 0.0) @ v
    ),
    "the mask is applied after the softmax, so that weights no longer sum to 1": masked_late,
    "the keys are used as values": lambda q, k, v, keep: plain(q, k, k, keep),
    "the values are used as keys": lambda q, k, v, keep: plain(q, v, v, keep),
    "the queries are used as keys": lambda q, k, v, keep: plain(q, q, v, keep),
    "the queries, already scaled, are used as keys": lambda q, k, v, keep: plain(
        SCALE * q, SCALE * q, v, keep, scale=1.0
    ),
    "the keys are used as queries": lambda q, k, v, keep: plain(k, k, v, keep),
    "queries and keys change places": lambda q, k, v, keep: plain(k, q, v, keep),
    "the key heads are in the reverse order": lambda q, k, v, keep: plain(q, k[:, ::-1], v, keep),
    "the value heads are in the reverse order": lambda q, k, v, keep: plain(q, k, v[:, ::-1], keep),
    "the weights of a head are applied to the values of the next head": lambda q, k, v, keep: plain(
        q[:, [2, 0, 1]], k[:, [2, 0, 1]], v, keep
    ),
    "the weights of a head are applied to the values of the head before": lambda q, k, v, keep: (
        plain(q[:, [1, 2, 0]], k[:, [1, 2, 0]], v, keep)
    ),
    "the queries of a head meet the keys of the next head": lambda q, k, v, keep: plain(
        q[:, [2, 0, 1]], k, v, keep
    ),
    "the queries of a head meet the keys of the head before": lambda q, k, v, keep: plain(
        q[:, [1, 2, 0]], k, v, keep
    ),
    "the heads are split by a view without a transposition": lambda q, k, v, keep: plain(
        *(split_by_a_view(x) for x in (q, k, v)), keep
    ),
    "the heads are split and merged by a view without a transposition": lambda q, k, v, keep: (
        merged_by_a_view(plain(*(split_by_a_view(x) for x in (q, k, v)), keep))
    ),
    "the keys are split by a view without a transposition": lambda q, k, v, keep: plain(
        q, split_by_a_view(k), v, keep
    ),
    "the heads are merged without transposing them back": lambda q, k, v, keep: merged_by_a_view(
        plain(q, k, v, keep)
    ),
    "the output is divided by the number of keys": lambda q, k, v, keep: plain(q, k, v, keep) / 5,
    "the last key is lost after the softmax": lambda q, k, v, keep: plain(
        q, k, v * (np.arange(5) < 4)[:, None], keep
    ),
}
VISIBLE = {  # those that a query which sees nothing would spoil
    "the last key is left out": lambda q, k, v, keep: plain(q, k, v, without(keep, -1)),
    "the first key is left out": lambda q, k, v, keep: plain(q, k, v, without(keep, 0)),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sentence", [*WOULD, *VISIBLE])
def test_a_mistake_is_what_its_sentence_says(sentence, causal):
    given = heads(causal=causal and sentence in WOULD)
    keep = np.broadcast_to(given.keep.numpy(), (2, 3, 5, 5))
    wanted = (WOULD | VISIBLE)[sentence](given.q.numpy(), given.k.numpy(), given.v.numpy(), keep)
    np.testing.assert_allclose(dict(mistakes(given))[sentence].numpy(), wanted, atol=1e-12)


@pytest.mark.parametrize("pairing", ["none", *TURNED])
def test_each_mistake_gives_another_output(pairing):
    given = heads()
    right = turned(given, pairing).out()
    found = dict(mistakes(given, pairing))
    assert all(out.shape == right.shape for out in found.values())
    for sentence, out in found.items():
        assert (out - right).abs().max() > 0.01, sentence
    if pairing != "none":
        assert set(found) == set(SENTENCES) - {AVERAGED}  # of ranks, which test_ranks asks


@pytest.mark.parametrize("pairing", ["none", *TURNED])
def test_mistakes_differ_from_each_other(pairing):
    """Without rotation, keys that were rotated are keys; for a square mask, nothing else is."""
    found = list(mistakes(heads(), pairing))
    same = {
        frozenset((one, other))
        for at, (one, out) in enumerate(found) for other, would in found[at + 1 :]
        if (out - would).abs().max() < 1e-9
    }  # fmt: skip
    keys = frozenset(("the keys are used as values", "the rotated keys are used as values"))
    assert same == ({keys} if pairing == "none" else set())


def test_right_heads_are_the_definition():
    for groups in (1, 3):
        given = heads(groups=groups)
        keep = given.keep.numpy()
        wanted = plain(given.q.numpy(), given.k.numpy(), given.v.numpy(), keep)
        np.testing.assert_allclose(given.out().numpy(), wanted, atol=1e-12)
        assert given.many == 3 // groups


def test_mistakes_of_other_sizes():
    """More keys than queries, values of an odd number of channels: what needs one shape is out."""
    given = heads(keys=7, width=5)
    for pairing in ("none", *TURNED):
        found = dict(mistakes(given, pairing))
        assert "the softmax runs over the queries" in found
        assert not {"the keys are used as values", "the values are rotated too"} & set(found)
        assert all(out.shape == (2, 3, 5, 5) for out in found.values())


def angles(x, pairing, first=0, theta=10_000.0):
    """RoPE of x [B, H, L, 4], channel by channel."""
    out = np.empty_like(x)
    for i in range(x.shape[2]):
        for pair in range(2):
            a, b = (pair, pair + 2) if pairing == "halves" else (2 * pair, 2 * pair + 1)
            angle = (first + i) * theta ** (-2 * pair / 4)
            cos, sin = np.cos(angle), np.sin(angle)
            out[..., i, a] = x[..., i, a] * cos - x[..., i, b] * sin
            out[..., i, b] = x[..., i, a] * sin + x[..., i, b] * cos
    return out


@pytest.mark.parametrize("pairing", TURNED)
def test_mistakes_of_rotation(pairing):
    given = heads()
    q, k, v, keep = (x.numpy() for x in (given.q, given.k, given.v, given.keep))
    q1, k1 = angles(q, pairing), angles(k, pairing)
    would = {
        "the values are rotated too": plain(q1, k1, angles(v, pairing), keep),
        "the queries and the values are rotated, and the keys are not": plain(
            q1, k, angles(v, pairing), keep
        ),
        "the queries are rotated, and the keys are not": plain(q1, k, v, keep),
        "the keys are rotated, and the queries are not": plain(q, k1, v, keep),
        "the queries are rotated by one position too many": plain(
            angles(q, pairing, 1), k1, v, keep
        ),
        "queries and keys are rotated twice": plain(
            angles(q1, pairing), angles(k1, pairing), v, keep
        ),
        "the rotated keys are used as values": plain(q1, k1, k1, keep),
        "the keys are used as values": plain(q1, k1, k, keep),
    }
    found = dict(mistakes(given, pairing))
    for sentence, wanted in would.items():
        np.testing.assert_allclose(found[sentence].numpy(), wanted, atol=1e-12, err_msg=sentence)
    right = plain(q1, k1, v, keep)
    np.testing.assert_allclose(turned(given, pairing).out().numpy(), right, atol=1e-12)
