"""The heads of a layer whose cache is spread over ranks: all on every rank, or some on each.

Where tensor parallelism has split the heads, each rank has the queries of its heads. It attends for
the heads of all ranks, so that it needs their queries; and to all key heads of its tokens, so that
each token is stored once. Each rank then gets the outputs of its own heads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from regard.distributed.ranks import Ranks
from regard.distributed.tensor.heads import HeadSplit, ranks_of_both, split_of
from regard.ops.partial import Partial, merge

STEP = "sharded decode: attention to this rank's tokens"
KEYS = "sharded decode: keys and values of the key heads of each rank"
QUERIES = "sharded decode: queries of the heads of each rank"
PARTS = "sharded decode: outputs of the heads of each rank"
_OTHERWISE = (
    "the cache was made for a layer whose heads are split otherwise; sharded_caches(layer, mesh) "
    "makes those of a layer"
)


class SameHeads:
    """Every rank of the cache has the queries, keys and values of the same heads."""

    split = None

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def check(self, layer: Any) -> None:
        """Raise if the ranks of the cache have different heads of a layer."""
        if both := ranks_of_both(layer, self.ranks):
            raise ValueError(
                f"the heads of this layer are split over ranks {both}, which would store other "
                "heads of each token; sharded_caches(layer, mesh) makes its cache"
            )

    def outlines(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Tensors of the shapes that attention has."""
        return q, k, v

    def streams(self, new: Sequence[Tensor]) -> list[Tensor]:
        """The streams of all key heads."""
        return list(new)

    def queries(self, q: Tensor) -> Tensor:
        """The queries that this rank attends with."""
        return q

    def merge(self, found: Partial, sinks: Tensor | None) -> Tensor:
        """Merge the partial results of all ranks to the outputs of this rank's heads."""
        return merge_over_ranks(self.ranks, found, sinks)


class SplitHeads:
    """Tensor parallelism has split the heads over the ranks of the cache, and the `keys` too unless
    they are latents, which are replicated."""

    def __init__(self, split: HeadSplit, *, keys: bool) -> None:
        self.split, self.keys, self.ranks = split, keys, split.ranks

    def check(self, layer: Any) -> None:
        """Raise if the heads of a layer are split otherwise."""
        if split_of(layer) is not self.split:
            raise ValueError(_OTHERWISE)

    def outlines(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Tensors of the shapes that attention has: with the heads of all ranks."""
        q = q[:, :1].expand(-1, self.split.num_heads, -1, -1)
        if not self.keys:
            return q, k, v
        return q, *(x[:, :1].expand(-1, self.split.num_kv_heads, -1, -1) for x in (k, v))

    def streams(self, new: Sequence[Tensor]) -> list[Tensor]:
        """The streams of all key heads, gathered if each rank has some."""
        if not self.keys:
            return list(new)
        if new[0].shape[1] != self.split.local_kv_heads:
            raise ValueError(_OTHERWISE)
        widths, joined = [each.shape[-1] for each in new], torch.cat(list(new), -1)
        every = self.ranks.all_gather(joined, KEYS)
        own = [
            every[rank].narrow(1, 0, len(self.split.kv_heads(rank)))
            for rank in range(0, self.ranks.size, self.split.replicas)
        ]
        return list(torch.cat(own, 1).split(widths, -1))

    def queries(self, q: Tensor) -> Tensor:
        """The queries of all heads."""
        every = enumerate(self.ranks.all_gather(q, QUERIES))
        return torch.cat([x.narrow(1, 0, len(self.split.heads(rank))) for rank, x in every], 1)

    def merge(self, found: Partial, sinks: Tensor | None) -> Tensor:
        """Merge the partial results of all ranks to the outputs of this rank's heads."""
        me, heads = self.ranks.rank, [self.split.heads(rank) for rank in self.ranks]
        packed = torch.cat([found.out, found.lse.unsqueeze(-1)], -1)
        mine = [packed.narrow(1, each.start, len(each)) for each in heads]
        send = {rank: each.contiguous() for rank, each in enumerate(mine) if rank != me}
        arrived = {rank: torch.empty_like(mine[me]).contiguous() for rank in send}
        self.ranks.exchange(send, arrived, PARTS).wait()
        every = [mine[me] if rank == me else arrived[rank] for rank in self.ranks]
        out = merge_parts(every, None if sinks is None else sinks[: len(heads[me])])
        padding = self.split.local_heads - out.shape[1]
        return functional.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out


Heads = SameHeads | SplitHeads


def heads_of(layer: Any, ranks: Ranks) -> Heads:
    """The assignment of a layer's heads to the ranks of a cache. Raises a ValueError if its heads
    are split over other ranks and some of these, or keys are rebuilt by the ranks that have their
    heads."""
    split, both = split_of(layer), ranks_of_both(layer, ranks)
    if split is None or not both:
        return SameHeads(ranks)
    if both != sorted(ranks.members) or both != sorted(split.ranks.members):
        raise ValueError(
            f"the heads of this layer are split over ranks {split.ranks.members}, its tokens "
            f"would be over ranks {ranks.members}; give one mesh, or two dimensions of one"
        )
    if layer.kind == "LatentKV":
        raise ValueError(
            "LatentKVAttention with split heads rebuilds keys on the ranks that have their heads, "
            "so that no rank can attend for all heads; spread its tokens over another dimension of "
            "the mesh, or split no heads"
        )
    return SplitHeads(split, keys=layer.kind != "MLA")


# ---- outputs and log-sum-exps, merged in float32 ----


def merge_over_ranks(ranks: Ranks, found: Partial, sinks: Tensor | None) -> Tensor:
    """Merge attention to the tokens of each rank, and once a score of a sink for each head:
    attention to the tokens of all ranks, the same bits on every rank."""
    packed = torch.cat([found.out, found.lse.unsqueeze(-1)], -1)
    every = ranks.all_gather(packed, STEP)
    return merge_parts(every, sinks)


def merge_parts(every: Sequence[Tensor], sinks: Tensor | None) -> Tensor:
    """The outputs, of packed outputs and log-sum-exps `[B, H, L, Dv + 1]` in order of ranks."""
    partials = [Partial(each[..., :-1], each[..., -1]) for each in every]
    if sinks is not None:
        partials.append(Partial.of_sinks(sinks))
    return merge(*partials).out
