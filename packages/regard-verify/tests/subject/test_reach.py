"""The heads of a module are reached in any layout: they give the definition's values."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import projecting
from projecting import DIM, HEADS, call_of, definition, trial
from regard_verify.subject.channels import find_roles
from regard_verify.subject.reach import find_attention, reach, replays, run_channels

AXES = list(itertools.permutations(("part", "head", "dim")))
SHAPES = {
    "three": (projecting.Layer, (3, 3)),
    "to_q and to_kv": (projecting.Pair, (3, 3)),
    "low-rank queries": (projecting.LowRank, (3, 3)),
    "GQA": (lambda: projecting.Grouped(2), (6, 2)),
    "MQA": (lambda: projecting.Grouped(1), (6, 1)),
    "a module for each head": (projecting.PerHead, (3, 3)),
    "norms": (projecting.Normed, (3, 3)),
    "einsum": (projecting.Einsum, (3, 3)),
    "another sequence": (projecting.Cross, (3, 3)),
    "sigmoid": (lambda: projecting.Gated(torch.sigmoid), (3, 3)),
    "product": (lambda: projecting.Gated(lambda x: x), (3, 3)),
    "SiLU": (lambda: projecting.Gated(nn.functional.silu), (3, 3)),
    **{f"fused {axes}": (lambda axes=axes: projecting.Fused(axes), (3, 3)) for axes in AXES},
}


def heads_of(found, keys=4, length=4):
    """q [B, H, L, D], k [B, G, S, D] and v [B, G, S, Dv] for what was reached."""
    heads, groups, dim, width = found.roles.sizes
    q = torch.randn(2, heads, length, dim)
    return q, torch.randn(2, groups, keys, dim), torch.randn(2, groups, keys, width)


def gives(found, q, k, v, **options):
    """That the heads which were reached give the definition's values."""
    with torch.no_grad():
        got = found(q, k, v).numpy()
    np.testing.assert_allclose(got, definition(q, k, v, **options), atol=2e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_heads_of_any_layout_are_those_of_the_definition(name):
    make, (heads, groups) = SHAPES[name]
    found = reach(call_of(make()), trial())
    assert found.roles.sizes == (heads, groups, DIM, DIM)
    gives(found, *heads_of(found))


def test_batch_second_and_tokens_in_one_axis():
    found = reach(call_of(projecting.BatchSecond(), layout="LBE"), trial())
    assert all(place.axes == ("BL", 15) and place.tokens_first for place in found.attention.sources)
    gives(found, *heads_of(found))


def test_another_sequence_may_be_of_another_length():
    found = reach(call_of(projecting.Cross()), trial())
    assert found.attention.cross
    assert [place.tokens for place in found.attention.sources] == ["L", "S", "S"]
    gives(found, *heads_of(found, keys=6))


def test_channels_shared_by_all_heads_are_left_out_and_counted():
    """The scale is that of all 7 query channels."""
    found = reach(call_of(projecting.Latent()), trial())
    assert found.roles.sizes == (3, 3, DIM, DIM)
    assert found.roles.others == 2
    assert len(found.roles.left_out) == 3 * 2 + 2
    gives(found, *heads_of(found), scale=(DIM + 2) ** -0.5)


def test_keys_that_all_heads_share_are_heads_too():
    """One key head of 2 channels, which each query head reads."""
    found = reach(call_of(projecting.Latent()), trial()).shared_keys()
    assert found.roles.sizes == (3, 1, 2, DIM)
    q, k, v = torch.randn(2, 3, 4, 2), torch.randn(2, 1, 4, 2), torch.randn(2, 3, 4, DIM)
    with torch.no_grad():
        got = found(q, k, v).numpy()
    wanted = definition(q, k.expand(-1, 3, -1, -1), v, scale=(DIM + 2) ** -0.5)
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    assert reach(call_of(projecting.Layer()), trial()).shared_keys() is None


class Copied(projecting.Layer):
    """All heads have the queries of the first."""

    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(7, DIM)

    def heads(self, x):
        q = torch.stack([self.to_q(x) for _ in range(HEADS)], 1)
        return q, projecting.by_head(self.to_k(x)), projecting.by_head(self.to_v(x))


def test_queries_that_are_copies_are_told():
    found = reach(call_of(Copied()), trial())
    assert found.copied_queries() == "to_q.weight"
    gives(found, *heads_of(found))
    assert reach(call_of(projecting.Layer()), trial()).copied_queries() == ""


def rolled(q, k, v):
    return (torch.softmax(q @ k.mT * DIM**-0.5, -1).roll(1, 1)) @ v


@pytest.mark.parametrize("layer", [projecting.Layer, projecting.Pair, projecting.LowRank])
def test_faults_do_not_hide_the_heads(layer):
    for scale in (1.0, 1 / DIM):
        core = lambda q, k, v, scale=scale: projecting.right(q, k, v, scale)  # noqa: E731
        found = reach(call_of(layer(core)), trial())
        gives(found, *heads_of(found), scale=scale)
    found = reach(call_of(layer(rolled)), trial())
    q, k, v = heads_of(found)
    with torch.no_grad():
        got = found(q, k, v).numpy()
    others = [(h - 1) % HEADS for h in range(HEADS)]  # whose weights a head's values get
    np.testing.assert_allclose(got, definition(q[:, others], k[:, others], v), atol=2e-5)


class NoAttention(nn.Module):
    """Projections and no attention: every token by itself."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(7, 15), nn.Linear(15, 7)

    def forward(self, x):
        return self.down(self.up(x).relu())


class NoWeights(nn.Module):
    def forward(self, x):
        return projecting.right(x, x, x)


@pytest.mark.parametrize("module", [NoAttention, NoWeights])
def test_a_module_without_heads_has_none(module):
    assert reach(call_of(module()), trial()) is None


class Counted(projecting.Layer):
    """Its scores depend on a projection of the whole batch, which no head's channels explain."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Linear(7, 1)

    def forward(self, x):
        q, k, v = self.heads(x)
        merged = self.core(q, k, v).transpose(1, 2).flatten(2)
        return self.out(merged + self.temperature(x).mean() ** 2)


def test_a_layout_that_does_not_replay_is_refused():
    """Channels that were given no role must not matter: here the values of one head do."""
    call = call_of(projecting.Layer())
    attention = find_attention(call, trial())
    roles = find_roles(lambda x: run_channels(attention, x), 45, trial())
    assert replays(attention, roles, trial())
    dead = type(roles)(roles.queries, roles.keys, roles.values[:2], roles.outputs, roles.gates)
    assert not replays(attention, dead, trial())


def test_a_projection_that_no_head_explains_is_refused():
    assert reach(call_of(Counted()), trial()) is None


@pytest.mark.parametrize("first", [True, False])
def test_torchs_own_layer_is_seen_inside(first):
    module = nn.MultiheadAttention(15, HEADS, batch_first=first)
    call = call_of(module, width=15, layout="BLE" if first else "LBE")
    found = reach(call, trial())
    assert found.roles.sizes == (HEADS, HEADS, DIM, DIM)
    gives(found, *heads_of(found, keys=6))


def test_projections_are_called_by_what_they_make():
    names = reach(call_of(projecting.Layer()), trial()).named_roles()
    assert names == {"to_q.weight": "q", "to_k.weight": "k", "to_v.weight": "v"}
    assert reach(call_of(projecting.Pair()), trial()).named_roles() == {"to_q.weight": "q"}


class Viewed(projecting.Layer):
    """Heads split by a view: they mix tokens, so that no channel belongs to one head."""

    def heads(self, x):
        return (w(x).view(len(x), HEADS, -1, DIM) for w in (self.to_q, self.to_k, self.to_v))


def test_a_mistake_that_mixes_tokens_is_reached_by_its_layout():
    attention = find_attention(call_of(Viewed()), trial())
    assert find_roles(lambda x: run_channels(attention, x), 45, trial()) is None
    found = reach(attention.call, trial(), HEADS)
    assert found.roles.queries == [list(range(5 * h, 5 * h + 5)) for h in range(3)]
    q, k, v = heads_of(found)
    viewed = [x.transpose(1, 2).reshape(2, HEADS, 4, DIM) for x in (q, k, v)]
    with torch.no_grad():
        got = found(q, k, v).numpy()
    np.testing.assert_allclose(got, definition(*viewed), atol=2e-5)


def test_another_dtype_than_that_of_the_weights_is_refused():
    found = reach(call_of(projecting.Layer()), trial())
    with pytest.raises(Exception, match=r"its weights are torch.float32, and it is called in"):
        found(*(x.double() for x in heads_of(found)))
    with pytest.raises(Exception, match="as many keys as queries"):
        found(*heads_of(found, keys=6))
