"""Every reshape has an inverse, and query head h uses key head h // group."""

import torch

from regard.heads import (
    fold_heads,
    group_heads,
    merge_heads,
    split_heads,
    unfold_heads,
    ungroup_heads,
)


def test_a_head_is_a_block_of_neighbouring_channels():
    x = torch.arange(2 * 3 * 8).reshape(2, 3, 8)
    heads = split_heads(x, 4)
    assert heads[1, 1, 2].tolist() == x[1, 2, 4:].tolist()
    assert torch.equal(merge_heads(heads), x)


def test_neighbouring_query_heads_share_a_key_head():
    x = torch.arange(6.0)[None, :, None, None]
    assert group_heads(x, 2).flatten(2).tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert torch.equal(ungroup_heads(group_heads(x, 2)), x)


def test_folding_stacks_the_query_heads_of_a_group():
    x = torch.randn(2, 6, 3, 5)
    rows = fold_heads(x, 2)
    assert rows.shape == (2, 2, 9, 5)
    assert torch.equal(rows[1, 1, 4], x[1, 4, 1])  # group 1, its second head, second query
    assert torch.equal(unfold_heads(rows, 3), x)
