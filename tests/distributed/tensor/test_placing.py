"""Where the rows of weights lie, and the mesh of ranks with the same key heads."""

import torch
from torch.distributed.tensor import Replicate, Shard

from ranks import on_ranks
from regard.distributed import HeadLayout, HeadSplit
from regard.distributed.ranks import Ranks
from regard.distributed.tensor.placing import Placing, mesh_of_replicas, order_of, rows_of


def test_rows():
    layout = HeadLayout(5, 5, 2)
    assert rows_of(layout, range(2), layout.heads, 3, 1) == [0, 1, 2, 3, 4, -1]
    shared = HeadLayout(3, 1, 2)
    assert rows_of(shared, range(2), shared.heads, 2, 2) == [0, 1, 2, 3, 4, 5, -1, -1]
    assert order_of([0, 1, 2], 3) is None
    assert order_of([0, 1, -1], 2).tolist() == [0, 1, -1]


def _mesh(mesh, replicas):
    ranks = Ranks(mesh)
    made = mesh_of_replicas(ranks, replicas)
    assert mesh_of_replicas(ranks, replicas) is made
    total = Ranks(made["replicas"]).all_reduce(torch.tensor([ranks.rank]), "replicas")
    return made.shape, made.get_coordinate(), int(total)


def test_the_mesh_of_replicas():
    """The groups are new, and the ranks of these meshes are in different numbers of groups."""
    for rank, (shape, place, total) in enumerate(on_ranks(4, _mesh, 2)):
        assert tuple(shape) == (2, 2)
        assert list(place) == [rank // 2, rank % 2]
        assert total == (1 if rank < 2 else 5)


def _placements(mesh, kv_heads):
    ranks = Ranks(mesh)
    place = Placing.of(HeadSplit(6, kv_heads, ranks.size, ranks))
    keys, both = place.kv_heads(4), place.keys_then_values(1)
    assert keys.summed is both.summed is None or keys.summed.size == place.split.replicas
    assert place.replicated(summed=True).summed is ranks
    assert place.replicated(summed=False).summed is None
    order = None if both.order is None else both.order.tolist()
    return keys.placements, place.heads(4, dim=1).placements, order


def test_placements():
    for number, kv_heads, placements, heads, order in (
        (2, 6, (Shard(0),), (Shard(1),), [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]),
        (2, 3, (Shard(0),), (Shard(1),), [0, 1, 3, 4, 2, -1, 5, -1]),
        (3, 1, (Replicate(),), (Shard(1),), None),
        (4, 2, (Shard(0), Replicate()), (Shard(1), Shard(1)), [0, 2, 1, 3]),
    ):
        for found in on_ranks(number, _placements, kv_heads):
            assert found == (placements, heads, order), (number, kv_heads)
