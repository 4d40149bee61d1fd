"""Means over the queries of each head, and an overview, summed up block by block of rows."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.see.row_weights import RowBlock

CELLS = 32  # rows and columns of an overview at most


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Means over the queries of a layer, `[heads]`, and overviews; as `AttentionMaps` has them."""

    entropy: Float[Tensor, " H"]
    distance: Float[Tensor, " H"]
    sink_share: Float[Tensor, " H"]
    previous_share: Float[Tensor, " H"]
    self_share: Float[Tensor, " H"]
    learned_sink: Float[Tensor, " H"]
    overview: Float[Tensor, "H rows columns"]


class Totals:
    """Sums over the queries of one layer.

    Args:
        heads: query heads.
        counted: of the queries of the call, those that are not padding.
        first: the first token that is not padding.
        tokens: those of the cache and the call; the queries are the last ones.
        sinks: whether the layer has learned sinks: the rest of its rows is their weight, and no
            rounding error.
    """

    def __init__(
        self,
        heads: int,
        counted: Bool[Tensor, " L"],
        first: int,
        tokens: int,
        *,
        sinks: bool = False,
    ) -> None:
        self._sinks = sinks
        self._counted, self._first = counted, first
        device = counted.device
        queries = counted.shape[0]
        self._past = tokens - queries
        self._rows = shares(queries, min(CELLS, queries), device) * counted[:, None]
        self._columns = shares(tokens, min(CELLS, tokens), device)
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._overview = torch.zeros(
            heads, self._rows.shape[1], self._columns.shape[1], device=device, dtype=torch.float64
        )
        self._weight = torch.zeros(heads, self._rows.shape[1], device=device, dtype=torch.float64)

    def add(self, block: RowBlock) -> None:
        """Add the queries of a block."""
        weights, on_keys = block.weights, block.weights.sum(-1)
        count, start = weights.shape[1], block.query - self._past
        counted = self._counted[start : start + count]
        seen = (on_keys > 0) & counted
        queries = torch.arange(count, device=weights.device) + block.query
        own = queries - block.key
        sink = (1 - on_keys).clamp(min=0) * self._sinks
        self._sum("entropy", _entropy(weights).sum(-1) + _entropy(sink), seen)
        self._sum("distance", _distance(weights, own) / on_keys, seen)
        self._sum("sink_share", _at(weights, own.new_full((count,), self._first - block.key)), seen)
        self._sum("previous_share", _at(weights, own - 1), seen & (queries > self._first))
        self._sum("self_share", _at(weights, own), seen)
        self._sum("learned_sink", sink, seen)
        self._add_to_overview(block, seen)

    def means(self) -> Statistics:
        """The means over the queries that see a key; 0 where there is none."""
        mean = {
            name: (total / self._counts[name].clamp(min=1)).float().cpu()
            for name, total in self._sums.items()
        }
        overview = self._overview / self._weight.clamp(min=1e-30).unsqueeze(-1)
        return Statistics(overview=overview.float().cpu(), **mean)

    def _sum(self, name: str, values: Tensor, seen: Tensor) -> None:
        """Add the values `[H, R]` of the queries that see a key."""
        total = values.to(torch.float64).masked_fill(~seen, 0).sum(-1)
        self._sums[name] = self._sums.get(name, 0) + total
        self._counts[name] = self._counts.get(name, 0) + seen.sum(-1)

    def _add_to_overview(self, block: RowBlock, seen: Bool[Tensor, "H R"]) -> None:
        weights, start = block.weights, block.query - self._past
        columns = self._columns[block.key : block.key + weights.shape[2]].to(weights.dtype)
        rows = self._rows[start : start + weights.shape[1]]
        by_head = rows.mT.to(weights.dtype) * seen.unsqueeze(1)  # [H, rows, R]
        self._overview += by_head @ (weights @ columns)
        self._weight += by_head.sum(-1)


def shares(count: int, cells: int, device: torch.device | None = None) -> Float[Tensor, "N C"]:
    """`count` tokens laid over `cells` equal intervals: the part of each token in each interval.

    Examples:
        >>> shares(3, 2).tolist()
        [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
    """
    width = count / max(1, cells)
    token = torch.arange(count, device=device, dtype=torch.float64).unsqueeze(1)
    cell = torch.arange(cells, device=device, dtype=torch.float64) * width
    low, high = torch.maximum(token, cell), torch.minimum(token + 1, cell + width)
    return (high - low).clamp(min=0)


def _entropy(weights: Tensor) -> Tensor:
    """`-w ln w` of each weight, 0 of 0: a third of the time of `torch.special.entr` on CPUs."""
    smallest = torch.finfo(weights.dtype).tiny
    return weights.clamp(min=smallest).log_().mul_(weights).neg_()


def _distance(weights: Tensor, own: Tensor) -> Float[Tensor, "H R"]:
    """The sum of weights times distances. `own` are the columns of the queries themselves."""
    columns = torch.arange(weights.shape[2], device=weights.device)
    away = (own[:, None] - columns).abs().to(weights.dtype)
    return torch.einsum("hrs,rs->hr", weights, away)


def _at(weights: Float[Tensor, "H R S"], columns: Tensor) -> Float[Tensor, "H R"]:
    """The weight of each row in one column; 0 where there is no such column."""
    keys = weights.shape[2]
    if not keys:
        return weights.new_zeros(weights.shape[:2])
    there = (columns >= 0) & (columns < keys)
    at = columns.clamp(0, keys - 1).expand(weights.shape[0], -1).unsqueeze(-1)
    return weights.gather(2, at).squeeze(-1) * there
