"""A mistake that mixes heads or tokens does not hide how the projections are cut."""

import pytest
import torch

from projecting import right, trial
from regard_verify.subject.layouts import natural_roles

BLOCKED = torch.arange(36).view(3, 3, 4).tolist()  # queries, keys, values of 3 heads
THREE = torch.arange(36).view(3, 12).tolist()  # the channels of three projections


def run_of(attend, cut=BLOCKED):
    """Values of 36 channels to merged heads [B, L, 12]; `attend` is given [B, L, H, D]."""

    def run(x):
        return attend(*(x[..., torch.tensor(part)] for part in cut)).flatten(2)

    return run


def scores(q, k):
    return torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5


def merged(weights, v):
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def viewed(x):
    batch, length, heads, dim = x.shape
    return x.reshape(batch, heads, length, dim)


def not_transposed(q, k, v):
    out = right(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.reshape(len(q), q.shape[1], -1)


MISTAKEN = {
    "none": lambda q, k, v: merged(scores(q, k).softmax(-1), v),
    "softmax over the queries": lambda q, k, v: merged(scores(q, k).softmax(-2), v),
    "softmax over the heads": lambda q, k, v: merged(scores(q, k).softmax(1), v),
    "no softmax": lambda q, k, v: merged(scores(q, k), v),
    "keys as values": lambda q, k, v: merged(scores(q, k).softmax(-1), k),
    "values as keys": lambda q, k, v: merged(scores(q, v).softmax(-1), v),
    "split by a view": lambda q, k, v: right(*(viewed(x) for x in (q, k, v))).transpose(1, 2),
    "merged by a view": not_transposed,
    "the last key is left out": lambda q, k, v: merged(
        scores(q, k)[..., :-1].softmax(-1), v[:, :-1]
    ),
}


@pytest.mark.parametrize("name", MISTAKEN)
def test_the_layout_is_found_with_the_mistake(name):
    for parts in ([list(range(36))], [THREE[0], THREE[1] + THREE[2]], THREE):
        found = natural_roles(run_of(MISTAKEN[name]), parts, 36, 3, trial())
        assert found is not None
        assert found.roles.outputs == torch.arange(12).view(3, 4).tolist()
        assert not found.causal
        assert found.pairing == "none"
        used = {"keys as values": 2, "values as keys": 2}.get(name, 3)  # who is what, if all matter
        cut = (found.roles.queries, found.roles.keys, found.roles.values)
        assert cut == tuple(BLOCKED) if used == 3 else found.roles.queries == BLOCKED[0]


def test_one_projection_cut_in_another_order():
    cube = torch.arange(36).view(4, 3, 3).permute(1, 2, 0).tolist()  # dim, part, head
    found = natural_roles(
        run_of(MISTAKEN["softmax over the queries"], cube), [list(range(36))], 36, 3, trial()
    )
    assert [found.roles.queries, found.roles.keys, found.roles.values] == cube


def test_a_gate_scales_the_output_of_a_mistake():
    wrong = run_of(MISTAKEN["softmax over the queries"])
    gated = lambda x: wrong(x[..., :36]) * torch.sigmoid(x[..., 36:])  # noqa: E731
    found = natural_roles(gated, [*THREE, list(range(36, 48))], 48, 3, trial())
    assert found.roles.queries == BLOCKED[0]
    assert (found.roles.gates, found.roles.opened) == (list(range(36, 48)), 30.0)


def test_each_head_has_projections_of_its_own():
    by_head = [list(range(first, first + 4)) for first in range(0, 36, 4)]  # q, k, v, q, k, v, ...
    cut = [by_head[at::3] for at in range(3)]
    wrong = MISTAKEN["softmax over the queries"]
    found = natural_roles(run_of(wrong, cut), by_head, 36, 3, trial())
    assert [found.roles.queries, found.roles.keys, found.roles.values] == cut


def test_the_number_of_heads_need_not_be_named():
    found = natural_roles(run_of(MISTAKEN["softmax over the queries"]), THREE, 36, None, trial())
    assert found.roles.queries == BLOCKED[0]


def test_a_causal_rule_and_a_mistake():
    def attend(q, k, v):
        keep = torch.ones(q.shape[1], q.shape[1]).tril()
        return merged(scores(q, k).softmax(-1) * keep, v)

    found = natural_roles(run_of(attend), [list(range(36))], 36, 3, trial())
    assert found.causal


def rotated(x):
    """Neighbours in pairs, of channels 0, 1 by one radian a token, of 2, 3 by a hundredth."""
    pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (2, 2)))
    angles = torch.arange(x.shape[1])[:, None, None] * torch.tensor([1.0, 0.01])
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def test_a_rotation_and_a_mistake():
    attend = lambda q, k, v: merged(scores(rotated(q), rotated(k)).softmax(-2), v)  # noqa: E731
    found = natural_roles(run_of(attend), [list(range(36))], 36, 3, trial())
    assert (found.pairing, found.roles.keys) == ("pairs", BLOCKED[1])


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: merged(scores(q, k).sigmoid(), v),
        lambda q, k, v: q.cumsum(-1) + k.cumsum(-1) * v.cumsum(-1),
        lambda q, k, v: merged(scores(q, k).softmax(-1), v) + 0.01 * v,
        lambda q, k, v: merged((0.9 * scores(q, k)).softmax(-1), v),
    ],
    ids=["sigmoid", "no attention", "a residual", "another scale"],
)
def test_what_no_known_mistake_gives_has_no_layout(attend):
    assert natural_roles(run_of(attend), THREE, 36, 3, trial()) is None


def test_channels_that_attention_does_not_read_are_zero():
    """A projection that feeds another one only: its values must not matter."""
    run = lambda x: run_of(MISTAKEN["none"])(x[..., :36]) + x[..., 36:].sum(-1, True)  # noqa: E731
    found = natural_roles(run, [list(range(36))], 40, 3, trial())
    assert found.roles.values == BLOCKED[2]
