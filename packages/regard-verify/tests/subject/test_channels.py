"""The roles of channels are found by what they change, in any order and with common faults."""

import pytest
import torch

from projecting import right, trial
from regard_verify.subject.channels import Roles, changes, find_roles


def layout(heads, groups, dim, *, others=0, seed=0):
    """Channels in random order: queries [H][D], keys [G][D], values [G][D], and those left.

    Heads are in the order of their first channels, by which they are told apart.
    """
    sizes = (heads * dim, groups * dim, groups * dim, others)
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randperm(sum(sizes), generator=generator).split(sizes)
    rows = (heads, groups, groups)
    cut = [part.view(n, dim).tolist() for part, n in zip(parts[:3], rows, strict=True)]
    return *(sorted(part, key=min) for part in cut), parts[3].tolist()


def attending(queries, keys, values, core=right, gate=None):
    """Values of all channels [B, L, C] to merged heads [B, L, H * D]."""

    def run(x):
        q, k, v = (x[..., torch.tensor(part)].transpose(1, 2) for part in (queries, keys, values))
        merged = core(q, k, v).transpose(1, 2).flatten(2)
        return merged if gate is None else merged * gate(x)

    return run


def pairs(one, other):
    """Which channels of two parts stand at the same place of a head."""
    many = len(one) // len(other)
    return {
        (a, b) for h, head in enumerate(one) for a, b in zip(head, other[h // many], strict=True)
    }


def are_roles(found, queries, keys, values):
    """That the found roles are those, but for the order of channels in a head."""
    assert found is not None
    assert [set(head) for head in found.queries] == [set(head) for head in queries]
    assert pairs(found.queries, found.keys) == pairs(queries, keys)
    outputs = torch.arange(sum(map(len, queries))).view(len(queries), -1).tolist()
    assert pairs(found.outputs, found.values) == pairs(outputs, values)


def causal(q, k, v):
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e30)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    "core",
    [
        right,
        causal,
        lambda q, k, v: right(q, k, v, scale=1.0),
        lambda q, k, v: right(q, k, v, scale=q.shape[-1] ** -1.0),
        lambda q, k, v: right(q, k, v, scale=q.shape[-1] ** 0.5),
    ],
    ids=["right", "causal", "no scale", "1 / D", "times the root"],
)
@pytest.mark.parametrize("sizes", [(3, 3, 5), (1, 1, 7), (5, 5, 1)])
def test_roles_in_any_order_of_channels(core, sizes):
    for seed in range(3):
        queries, keys, values, _ = layout(*sizes, seed=seed)
        run = attending(queries, keys, values, core)
        are_roles(find_roles(run, 3 * sizes[0] * sizes[2], trial()), queries, keys, values)


@pytest.mark.parametrize("groups", [1, 2])
def test_key_heads_that_several_query_heads_read(groups):
    """Blocked, as heads of one group are neighbours only in the order of their channels."""
    channels = torch.arange((6 + 2 * groups) * 5)
    parts = channels.split([30, 5 * groups, 5 * groups])
    queries, keys, values = (part.view(-1, 5).tolist() for part in parts)
    found = find_roles(attending(queries, keys, values), len(channels), trial())
    are_roles(found, queries, keys, values)
    assert found.sizes == (6, groups, 5, 5)


@pytest.mark.parametrize(
    ("opening", "opened"),
    [(torch.sigmoid, 30.0), (lambda x: x, 1.0), (torch.exp, 0.0)],
    ids=["sigmoid", "product", "exp"],
)
def test_gates_scale_the_output_and_are_opened(opening, opened):
    queries, keys, values, gates = layout(3, 3, 5, others=15)
    gate = torch.tensor(gates)
    run = attending(queries, keys, values, gate=lambda x: opening(x[..., gate]))
    found = find_roles(run, 60, trial())
    are_roles(found, queries, keys, values)
    assert found.gates == sorted(gates)
    assert found.opened == opened


def test_a_gate_that_never_scales_by_one_gives_none():
    queries, keys, values, gates = layout(3, 3, 5, others=15)
    run = attending(queries, keys, values, gate=lambda x: 3 + x[..., torch.tensor(gates)].sin())
    assert find_roles(run, 60, trial()) is None


def test_channels_that_change_nothing_have_no_role():
    queries, keys, values, idle = layout(3, 3, 5, others=4)
    found = find_roles(attending(queries, keys, values), 49, trial())
    are_roles(found, queries, keys, values)
    used = {c for part in (found.queries, found.keys, found.values) for head in part for c in head}
    assert used == set(range(49)) - set(idle)
    assert found.gates == []


def test_keys_that_all_heads_share_are_left_out():
    queries, keys, values, rest = layout(3, 3, 5, others=3 * 2 + 2)
    shared = torch.tensor(rest[6:])
    more = torch.tensor(rest[:6]).view(3, 2)

    def run(x):
        q, k, v = (x[..., torch.tensor(part)].transpose(1, 2) for part in (queries, keys, values))
        q = torch.cat([q, x[..., more].transpose(1, 2)], -1)
        k = torch.cat([k, x[..., shared][:, None].expand(-1, 3, -1, -1)], -1)
        return right(q, k, v).transpose(1, 2).flatten(2)

    found = find_roles(run, 53, trial())
    are_roles(found, queries, keys, values)
    assert sorted(found.left_out) == sorted(rest)
    assert found.others == 2


def mean(x):
    """No keys: each token reads all values."""
    return x.mean(1, keepdim=True).expand_as(x)


def halves(x):
    """Heads of one output channel each, and of two."""
    q, k, v = x.split(3, -1)
    one = right(*(part[..., None, :1].transpose(1, 2) for part in (q, k, v)))
    two = right(*(part[..., None, 1:].transpose(1, 2) for part in (q, k, v)))
    return torch.cat([one, two], -1)[:, 0]


def viewed(x):
    """Heads that are split by a view mix tokens."""
    q, k, v = (part.reshape(len(part), 3, -1, 2) for part in x.split(6, -1))
    return right(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("run", "channels"),
    [(torch.relu, 6), (mean, 6), (halves, 9), (viewed, 18), (lambda x: x * float("nan"), 6)],
    ids=["by token", "mean", "uneven heads", "viewed", "nan"],
)
def test_what_has_no_heads_gives_none(run, channels):
    assert find_roles(run, channels, trial()) is None


def test_changes_are_those_of_one_channel_at_one_token():
    run = lambda x: x.cumsum(1) * 2  # noqa: E731
    found = changes(run, torch.zeros(5, 70), list(range(70)), 3.0)
    wanted = torch.zeros(70, 5, 70)
    wanted[torch.arange(70), 2:, torch.arange(70)] = 6.0
    assert torch.equal(found, wanted)


def test_sizes_of_roles():
    roles = Roles([[0], [1]], [[2]], [[3, 4]], [[0, 1], [2, 3]], [])
    assert roles.sizes == (2, 1, 1, 2)
