"""A function that reads keys and values from pages, as a function of (q, k, v)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard_verify.subject.subject import output_of

BLOCK = 4  # tokens of a page


class OnPages:
    """Calls a paged function with each query as a row that has pages of its own.

    The function takes q [B, H, D], k_pool [N, T, G, D], v_pool, block_table [B, M] and lengths [B],
    and returns [B, H, D]. Of S keys, query i of L sees the first S - L + i + 1. Places of the pools
    without a token are NaN, and entries of the table without a page are invalid.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", "attention")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output [B, H, L, Dv]; a query that sees no key gives zeros."""
        batch, heads, queries, _ = q.shape
        lengths = (torch.arange(queries) + 1 + k.shape[2] - queries).clamp(min=0).repeat(batch)
        used = lengths > 0
        if not used.any():
            return q.new_zeros(*q.shape[:3], v.shape[3])
        lengths = lengths[used]
        count = -(-k.shape[2] // BLOCK)  # pages of a row
        order = torch.randperm(len(lengths) * count, generator=torch.Generator().manual_seed(0))
        pools = [self._pool(x.repeat_interleave(queries, 0)[used], lengths, order) for x in (k, v)]
        table = order.view(-1, count)
        table = torch.where(
            torch.arange(count) * BLOCK < lengths[:, None], table, len(order) * 1000
        )
        out = q.new_zeros(len(used), heads, v.shape[3])
        rows = q.transpose(1, 2).flatten(0, 1)[used]
        got = output_of(self.function(rows, *pools, table, lengths), rows.numel())
        out = out.to(got.dtype).index_put((used.nonzero()[:, 0],), got)
        return out.unflatten(0, (batch, queries)).transpose(1, 2)

    def _pool(self, x: Tensor, lengths: Tensor, order: Tensor) -> Tensor:
        """Pages [N, T, G, D] in this order, of x [B, G, S, D] for each row."""
        x = x.transpose(1, 2)
        x = torch.cat([x, x.new_zeros(len(x), -x.shape[1] % BLOCK, *x.shape[2:])], 1)
        held = torch.arange(x.shape[1]) < lengths[:, None]
        pages = torch.where(held[..., None, None], x, float("nan")).unflatten(1, (-1, BLOCK))
        return pages.flatten(0, 1)[order.argsort()]
