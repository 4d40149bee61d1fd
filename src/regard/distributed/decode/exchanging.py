"""The exchange of attention to each rank's tokens: outputs and log-sum-exps, merged in float32."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.constants import accumulating_dtype
from regard.distributed.ranks import Ranks, expected
from regard.ops.partial import Partial, merge

STEP = "sharded decode: attention to this rank's tokens"


def merged_over_ranks(ranks: Ranks, found: Partial, sinks: Tensor | None) -> Tensor:
    """Attention to the tokens of all ranks, the same bits on every rank.

    Args:
        ranks: those that hold the tokens.
        found: attention to this rank's.
        sinks: a score for each head, merged once.
    """
    packed = torch.cat([found.out, found.lse.unsqueeze(-1)], -1)
    count = bytes_of_parts((ranks.size - 1) * found.lse.numel(), found.out.shape[-1], packed.dtype)
    with expected(count, STEP):
        every = ranks.gathered(packed, STEP)
    return merged(every, sinks)


def merged(every: Sequence[Tensor], sinks: Tensor | None) -> Tensor:
    """The outputs, of packed outputs and log-sum-exps `[B, H, L, Dv + 1]` in order of ranks."""
    partials = [Partial(each[..., :-1], each[..., -1]) for each in every]
    if sinks is not None:
        partials.append(Partial.of_sinks(sinks))
    return merge(*partials).out


def bytes_of_parts(rows: int, v_head_dim: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of outputs and log-sum-exps, which are float32; float64 for float64.

    Args:
        rows: of heads, queries and batch rows, times the ranks that they are sent to.
        v_head_dim: size of an output.
        dtype: of the layer.

    Examples:
        >>> from regard.distributed.decode.exchanging import bytes_of_parts
        >>> bytes_of_parts(32, 128)  # a decoded token of a layer of 32 heads of 128, on two ranks
        16512
    """
    return rows * (v_head_dim + 1) * accumulating_dtype(dtype).itemsize
