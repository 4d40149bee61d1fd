"""The placement of a split layer's weights: the rows of its heads, in order of ranks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from regard.distributed.ranks import Ranks
from regard.distributed.tensor.heads import HeadLayout, HeadSplit
from regard.distributed.tensor.linear import SummedOutput
from regard.distributed.tensor.weights import Share, Split, SplitStyle

_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[int, DeviceMesh]] = WeakKeyDictionary()


def mesh_of_replicas(ranks: Ranks, replicas: int) -> DeviceMesh:
    """The mesh as rows of ranks that have the same key heads, of two dimensions; the mesh itself if
    no rank or every rank has the same. All ranks of the mesh call this together."""
    if replicas in (1, ranks.size):
        return ranks.mesh
    meshes = _MESHES.setdefault(ranks.group, {})
    if replicas not in meshes:
        members = torch.tensor(ranks.members, device="cpu")
        table = members.view(-1, replicas)
        row, column = divmod(ranks.rank, replicas)
        _make_as_many_groups(ranks)
        groups = [
            dist.new_group(each.tolist(), ranks.timeout, use_local_synchronization=True)
            for each in (table[:, column], table[row])
        ]
        meshes[replicas] = DeviceMesh.from_group(
            groups, ranks.mesh.device_type, table, mesh_dim_names=("groups", "replicas")
        )
    return meshes[replicas]


def _make_as_many_groups(ranks: Ranks) -> None:
    """Groups of this rank alone, until all ranks of the mesh are in equally many.

    torch names a new group by its ranks and by the number of groups that this rank is in already.
    Ranks with different numbers, as in meshes that do not cover the world, would wait for groups of
    different names until the time-out.
    """
    number = len(distributed_c10d._world.pg_names)
    numbers = ranks.all_gather(
        torch.tensor([number], device=ranks.mesh.device_type), "tensor parallel: numbers of groups"
    )
    for _ in range(int(max(numbers)) - number):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


@dataclass(frozen=True, eq=False)
class Placing:
    """The placement of a layer's parameters on the ranks."""

    split: HeadSplit  # the heads of the layer
    mesh: DeviceMesh  # of one dimension, or of groups and replicas

    @classmethod
    def of(cls, split: HeadSplit) -> "Placing":
        """With the mesh that the heads need, which all ranks make together."""
        return cls(split, mesh_of_replicas(split.ranks, split.replicas))

    @property
    def replicas(self) -> Ranks | None:
        """The ranks with the key heads of this one; None if it has them alone."""
        if self.split.replicas == 1:
            return None
        return self.split.ranks if self.mesh.ndim == 1 else Ranks(self.mesh["replicas"])

    def heads(self, channels: int, dim: int = 0) -> Share:
        """How each rank takes its query heads from the rows, or columns, of a weight."""
        split = self.split
        rows = rows_of(split, range(split.size), split.heads, split.local_heads, channels)
        total = split.num_heads * channels
        return Share(self.mesh, (Shard(dim),) * self.mesh.ndim, dim, order_of(rows, total))

    def kv_heads(self, channels: int) -> Share:
        """How each rank takes its key heads from the rows of a weight."""
        split = self.split
        firsts = range(0, split.size, split.replicas)
        rows = rows_of(split, firsts, split.kv_heads, split.local_kv_heads, channels)
        return self._of_keys(rows, split.num_kv_heads * channels)

    def keys_then_values(self, channels: int) -> Share:
        """As `kv_heads`, of a weight with the rows of all key heads, then of all value heads, as
        `LatentKVAttention` has them. Each rank has its keys, then its values."""
        split, rows = self.split, []
        half = split.num_kv_heads * channels
        for first in range(0, split.size, split.replicas):
            own = rows_of(split, [first], split.kv_heads, split.local_kv_heads, channels)
            rows += own + [row if row < 0 else row + half for row in own]
        return self._of_keys(rows, 2 * half)

    def _of_keys(self, rows: list[int], total: int) -> Share:
        whole = self.split.replicas == self.split.size
        placements: tuple[Placement, ...] = (Replicate(),) if whole else (Shard(0),)
        if self.mesh.ndim == 2:
            placements = Shard(0), Replicate()
        return Share(self.mesh, placements, 0, order_of(rows, total), self.replicas)

    def linear(self, kind: type[Split], rows: Share) -> SplitStyle:
        """A linear layer, the rows of whose weight and bias are split."""
        return SplitStyle(self.split, kind, {"weight": rows, "bias": rows})

    def output(self, channels: int) -> SplitStyle:
        """The linear layer that reads the outputs of the heads: its columns are split."""
        shares = {"weight": self.heads(channels, dim=1), "bias": self.replicated(summed=False)}
        return SplitStyle(self.split, SummedOutput, shares)

    def whole(self, kind: type[Split], *, summed: bool = False) -> SplitStyle:
        """A module that every rank has and applies to the same, or, with `summed` gradients, to
        its own heads."""
        return SplitStyle(self.split, kind, self.replicated(summed=summed))

    def replicated(self, *, summed: bool) -> Share:
        """Every rank has it; its gradients are summed where each rank's is that of its heads."""
        placements = (Replicate(),) * self.mesh.ndim
        return Share(self.mesh, placements, summed=self.split.ranks if summed else None)


def rows_of(
    layout: HeadLayout,
    ranks: Iterable[int],
    heads: Callable[[int], range],
    padded: int,
    channels: int,
) -> list[int]:
    """The rows of one device's weight that lie on these ranks, in order; -1 for padding rows.

    Examples:
        >>> from regard.distributed import HeadLayout
        >>> from regard.distributed.tensor.placing import rows_of
        >>> layout = HeadLayout(3, 3, 2)
        >>> rows_of(layout, range(2), layout.heads, layout.local_heads, 2)
        [0, 1, 2, 3, 4, 5, -1, -1]
    """
    rows: list[int] = []
    for rank in ranks:
        own = heads(rank)
        rows += range(own.start * channels, own.stop * channels)
        rows += [-1] * ((padded - len(own)) * channels)
    return rows


def order_of(rows: list[int], total: int) -> torch.Tensor | None:
    """The order of rows, as `Share` takes it; None if it is that of one device."""
    return None if rows == list(range(total)) else torch.tensor(rows, device="cpu")
