"""Tensor, context and data parallel attention over torch.distributed."""

from regard.distributed.clipping import clip_gradients
from regard.distributed.context.parallel import context_parallel
from regard.distributed.context.plan import ContextParallel
from regard.distributed.context.summing import sum_gradients
from regard.distributed.decode.sharded import ShardedCache, sharded_caches
from regard.distributed.ranks import RankError, counted
from regard.distributed.shards import Shards
from regard.distributed.tensor.heads import HeadLayout, HeadSplit
from regard.distributed.tensor.parallel import tensor_parallel

__all__ = [
    "ContextParallel",
    "HeadLayout",
    "HeadSplit",
    "RankError",
    "ShardedCache",
    "Shards",
    "clip_gradients",
    "context_parallel",
    "counted",
    "sharded_caches",
    "sum_gradients",
    "tensor_parallel",
]
