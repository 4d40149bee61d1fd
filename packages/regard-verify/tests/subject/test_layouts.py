"""Usual layouts: those that people write are among them, each uses every channel once."""

import itertools

import pytest
import torch

from regard_verify.subject.layouts import HEADS, usual_layouts

PARTS = list(itertools.permutations(range(3)))


def cube(axes, heads, dim):
    """Queries, keys and values [H][D] of one projection with these axes, by index arithmetic."""
    sizes = {"part": 3, "head": heads, "dim": dim}

    def channel(**at):
        found = 0
        for axis in axes:
            found = found * sizes[axis] + at[axis]
        return found

    return [
        [[channel(part=p, head=h, dim=d) for d in range(dim)] for h in range(heads)]
        for p in range(3)
    ]


def found_in(layouts, queries, keys, values):
    return any((r.queries, r.keys, r.values) == (queries, keys, values) for r in layouts)


@pytest.mark.parametrize("order", PARTS)
@pytest.mark.parametrize("axes", list(itertools.permutations(("part", "head", "dim"))))
def test_one_projection_in_any_order(axes, order):
    cut = cube(axes, 3, 5)
    layouts = list(usual_layouts([list(range(45))], 15, 3))
    assert found_in(layouts, *(cut[at] for at in order))
    assert layouts[0].queries == [list(range(5 * h, 5 * h + 5)) for h in range(3)]


@pytest.mark.parametrize("order", PARTS)
def test_three_projections_in_any_order(order):
    parts = torch.arange(45).view(3, 15).tolist()
    layouts = list(usual_layouts(parts, 15))
    split = [torch.tensor(part).view(3, 5).tolist() for part in parts]
    tiled = [torch.tensor(part).view(5, 3).T.tolist() for part in parts]
    assert found_in(layouts, *(split[at] for at in order))
    assert found_in(layouts, *(tiled[at] for at in order))


def test_fewer_key_heads():
    """6 heads of 5 channels, 2 of keys: three projections, two, one, and one by group."""
    q, k, v = torch.arange(50).split([30, 10, 10])
    queries, keys, values = (x.view(-1, 5).tolist() for x in (q, k, v))
    for parts in ([q, k, v], [q, torch.cat([k, v])], [torch.cat([q, k, v])]):
        layouts = usual_layouts([part.tolist() for part in parts], 30, 6)
        assert found_in(layouts, queries, keys, values)
    groups = torch.arange(50).view(2, 5, 5)
    layouts = usual_layouts([list(range(50))], 30, 6)
    assert found_in(
        layouts, groups[:, :3].flatten(0, 1).tolist(), groups[:, 3].tolist(), groups[:, 4].tolist()
    )


def test_keys_and_values_together():
    queries = torch.arange(15).view(3, 5).tolist()
    both = torch.arange(15, 45)
    for k, v in (
        both.view(2, 3, 5),
        both.view(3, 2, 5).unbind(1),
        both.view(3, 5, 2).unbind(2),
        both.view(3, 2, 5).flip(1).unbind(1),
    ):
        parts = [queries[0] + queries[1] + queries[2], both.tolist()]
        for order in (parts, parts[::-1]):
            assert found_in(usual_layouts(order, 15, 3), queries, k.tolist(), v.tolist())


def test_query_channels_for_keys_that_all_heads_share():
    queries = torch.arange(3 * 7).view(3, 7)
    keys, values = torch.arange(21, 51).view(3, 2, 5).unbind(1)
    parts = [queries.flatten().tolist(), list(range(21, 51))]
    layout = next(
        each for each in usual_layouts(parts, 15, 3)
        if each.keys == keys.tolist() and each.values == values.tolist()
    )  # fmt: skip
    assert layout.queries == queries[:, :5].tolist()
    assert layout.others == 2


@pytest.mark.parametrize("sizes", [[45], [15, 15, 15], [15, 30], [50], [30, 10, 10], [30, 20]])
def test_each_layout_uses_a_channel_once_in_even_heads(sizes):
    width = 30 if 50 in (sum(sizes), sizes[0]) else 15
    parts = [part.tolist() for part in torch.arange(sum(sizes)).split(sizes)]
    layouts = list(usual_layouts(parts, width))
    assert layouts
    for each in layouts:
        cut = (each.queries, each.keys, each.values)
        used = [c for part in cut for head in part for c in head]
        assert len(used) == len(set(used))
        assert set(used) <= set(range(sum(sizes)))
        assert all(len({len(head) for head in part}) == 1 for part in cut)
        assert sorted(c for head in each.outputs for c in head) == list(range(width))
        assert len(each.queries) % len(each.keys) == 0
        assert len(each.values[0]) * len(each.outputs) == width


def test_what_does_not_divide_has_no_layout():
    assert list(usual_layouts([list(range(44))], 15)) == []
    parts = torch.arange(45).view(3, 15).tolist()
    assert {len(each.outputs) for each in usual_layouts(parts, 15)} == {
        heads for heads in HEADS if 15 % heads == 0
    }
    assert len(next(usual_layouts(parts, 15, 5)).outputs) == 5
