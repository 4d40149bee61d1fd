"""Which tokens a cache should keep: scores as values, computed without a matrix of L x S.

A score is a function of the rows that a cache holds: the more, the longer a token stays. Scores of
queries read the last ones that the cache has seen, a key head at a time.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.cache.streams import check_whole
from regard.sparse.moments import QueryMoments


class Rows(NamedTuple):
    """The tokens that a cache holds for each key head, as a score reads them.

    Attributes:
        keys: `[B, G, n, D]`, rotated at their positions.
        values: `[B, G, n, Dv]`.
        slots: `[B, G, n]`, the slot of each row, in ascending order.
        visible: `[B, G, n]`, whether the last query may attend to the row.
        queries: `[B, H, w, D]`, rotated: the last ones, whose slots end at `length - 1`.
        received: `[B, G, n]`, the attention that each row has received so far, if it is summed.
        length: tokens seen.
        scale: factor of the scores of attention.

    Examples:
        >>> import torch
        >>> from regard.sparse import Rows, Streaming
        >>> k, slots = torch.zeros(1, 1, 3, 4), torch.tensor([[[0, 5, 6]]])
        >>> seen = torch.ones(1, 1, 3, dtype=torch.bool)
        >>> Streaming()(Rows(k, k, slots, seen, k[:, :, :0], None, length=7, scale=0.5)).tolist()
        [[[0.0, 5.0, 6.0]]]
    """

    keys: Float[Tensor, "B G n D"]
    values: Float[Tensor, "B G n Dv"]
    slots: Int[Tensor, "B G n"]
    visible: Bool[Tensor, "B G n"]
    queries: Float[Tensor, "B H w D"]
    received: Float[Tensor, "B G n"] | None
    length: int
    scale: float


@runtime_checkable
class Score(Protocol):
    """The protocol of scores.

    Examples:
        >>> from regard.sparse import Score, Streaming
        >>> isinstance(Streaming(), Score)
        True
    """

    @property
    def queries(self) -> int:
        """How many of the last queries are read; 0 for none."""

    @property
    def sums(self) -> bool:
        """Whether the attention that each row receives from every query is summed."""

    def __call__(self, rows: Rows) -> Float[Tensor, "B G n"]:
        """The score of each token for each key head; tokens with the lowest scores are evicted."""


@dataclass(frozen=True)
class Streaming:
    """The age of a token: with `sinks`, StreamingLLM (Xiao et al. 2023, arXiv:2309.17453).

    Examples:
        >>> from regard.sparse import EvictingCache, Streaming
        >>> EvictingCache(64, score=Streaming(), sinks=4)
        EvictingCache(64, score=Streaming(), sinks=4, recent=16)
    """

    queries = 0
    sums = False

    def __call__(self, rows: Rows) -> Tensor:
        return rows.slots.float()


@dataclass(frozen=True)
class KeyDiff:
    """How little a key is like the mean of all keys.

    It reads no queries (Park et al. 2025, arXiv:2504.15364).

    Examples:
        >>> from regard.sparse import KeyDiff
        >>> KeyDiff().queries
        0
    """

    queries = 0
    sums = False

    def __call__(self, rows: Rows) -> Tensor:
        keys = F.normalize(rows.keys.float(), dim=-1) * rows.visible[..., None]
        return -(keys @ F.normalize(keys.sum(2), dim=-1)[..., None])[..., 0]


@dataclass(frozen=True)
class SnapKV:
    """The attention of the last queries, smoothed over neighbouring tokens.

    SnapKV (Li et al. 2024, arXiv:2404.14469). A later question finds no answer if the last queries
    did not look for it.

    Args:
        window: the number of queries.
        kernel: rows that are averaged, an odd number; 1 for none.

    Raises:
        ValueError: if a number is below 1, or `kernel` even.

    Examples:
        >>> from regard.sparse import SnapKV
        >>> SnapKV(window=16).queries
        16
    """

    window: int = 32
    kernel: int = 7
    sums = False

    def __post_init__(self) -> None:
        check_whole("window", self.window, least=1)
        check_whole("kernel", self.kernel, least=1)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel is an odd number of rows, got {self.kernel}")

    @property
    def queries(self) -> int:
        """The number of queries."""
        return self.window

    def __call__(self, rows: Rows) -> Tensor:
        scores = mean_attention(rows)
        return F.avg_pool1d(scores, self.kernel, 1, self.kernel // 2, count_include_pad=False)


@dataclass(frozen=True)
class TOVA:
    """The attention of the last query, averaged over all heads of the layer.

    All heads keep the same tokens (Oren et al. 2024, arXiv:2401.06104).

    Examples:
        >>> from regard.sparse import TOVA
        >>> TOVA().queries
        1
    """

    queries = 1
    sums = False

    def __call__(self, rows: Rows) -> Tensor:
        scores = mean_attention(rows)
        return scores.mean(1, keepdim=True).expand_as(scores)


@dataclass(frozen=True)
class H2O:
    """The sum of the attention of all queries so far (Zhang et al. 2023, arXiv:2306.14048).

    Every call computes the attention weights a second time, a block of queries at a time.

    Examples:
        >>> from regard.sparse import H2O
        >>> H2O().sums
        True
    """

    queries = 0
    sums = True

    def __call__(self, rows: Rows) -> Tensor:
        assert rows.received is not None
        return rows.received


@dataclass(frozen=True, eq=False)
class ExpectedAttention:
    """The attention that a token can expect from later queries, times the norm of its value.

    Expected attention (Devoto et al. 2025, arXiv:2510.00636).
    Queries are taken as normally distributed: `exp(mean.k + k'covariance k / 2)` is then the mean
    of the exponential of a score. Without `moments` mean and covariance are those of the last
    queries that the cache has seen. With `moments` they are of queries over other text, so that
    the score of a shared prefix does not depend on where the prefix ends.

    Args:
        moments: mean and covariance of the layer's queries, from `query_moments`.
        window: without `moments`, the number of queries that are read.
        horizon: with `moments`, the number of positions ahead over which rotations are averaged.

    Raises:
        TypeError: if `moments` is none.
        ValueError: if a number is below 1, or, when tokens are evicted, `moments` is of queries of
            another number or width than the layer's.

    Examples:
        >>> from regard.sparse import ExpectedAttention
        >>> ExpectedAttention(window=64).queries
        64
    """

    moments: QueryMoments | None = None
    window: int = 128
    horizon: int = 512
    sums = False

    def __post_init__(self) -> None:
        check_whole("window", self.window, least=1)
        check_whole("horizon", self.horizon, least=1)
        if not isinstance(self.moments, QueryMoments | None):
            raise TypeError(f"moments is a QueryMoments of one layer, got {self.moments!r:.80}")

    @property
    def queries(self) -> int:
        """The number of queries that are read: none with `moments`."""
        return self.window if self.moments is None else 0

    def __call__(self, rows: Rows) -> Tensor:
        if self.moments is None:
            queries = rows.queries.float()
            mean = queries.mean(2)
            centred = queries - mean[:, :, None]
            covariance = centred.mT @ centred / queries.shape[2]
        else:
            self._check_moments(self.moments, rows)
            mean, covariance = self.moments.ahead(rows.length, self.horizon)
        batch, heads = rows.keys.shape[:2]
        mean = mean.expand(batch, *mean.shape[-2:]).unflatten(1, (heads, -1))
        covariance = covariance.expand(batch, *covariance.shape[-3:]).unflatten(1, (heads, -1))
        hidden = ~rows.visible
        scores = []
        for head in range(heads):
            keys = rows.keys[:, head, None].float()  # [B, 1, n, D], for the heads of a group
            linear = (keys @ mean[:, head, ..., None])[..., 0] * rows.scale
            square = ((keys @ covariance[:, head]) * keys).sum(-1) * rows.scale**2
            expected = (linear + square / 2).masked_fill(hidden[:, head, None], -math.inf)
            scores.append(expected.softmax(-1).nan_to_num(0.0).mean(1))
        return torch.stack(scores, 1) * rows.values.float().norm(dim=-1)

    @staticmethod
    def _check_moments(moments: QueryMoments, rows: Rows) -> None:
        """Raise unless they are of a layer with these rows; without queries there may be none."""
        heads, width = moments.mean.shape
        key_heads, query_heads = rows.keys.shape[1], rows.queries.shape[1]
        known = (
            (query_heads,) if query_heads != key_heads else range(key_heads, heads + 1, key_heads)
        )
        if width != rows.keys.shape[3] or heads not in known:
            raise ValueError(
                f"the layer has {query_heads} query heads of {rows.keys.shape[3]} channels, got "
                f"moments of [{heads}, {width}]; query_moments(model, ids) has one for each layer"
            )

    def __repr__(self) -> str:
        if self.moments is None:
            return f"ExpectedAttention(window={self.window})"
        return f"ExpectedAttention({self.moments!r}, horizon={self.horizon})"


def mean_attention(rows: Rows) -> Float[Tensor, "B G n"]:
    """The mean of the attention weights of the last queries and the heads of each group."""
    first = rows.length - rows.queries.shape[2]
    slots = torch.arange(first, rows.length, device=rows.slots.device)
    hidden = (rows.slots[:, :, None] > slots[:, None]) | ~rows.visible[:, :, None]
    return attention_weights(rows.queries, rows.keys, ~hidden, rows.scale).mean(2)


def attention_weights(
    queries: Float[Tensor, "B H w D"],
    keys: Float[Tensor, "B G n D"],
    visible: Bool[Tensor, "B G w n"],
    scale: float,
) -> Float[Tensor, "B G w n"]:
    """The attention weights of some queries, averaged over the heads of each group: one key head
    at a time, in float32."""
    heads = keys.shape[1]
    grouped = queries.unflatten(1, (heads, -1)).float() * scale
    found = []
    for head in range(heads):
        scores = grouped[:, head] @ keys[:, head, None].float().mT
        scores = scores.masked_fill(~visible[:, head, None], -math.inf)
        found.append(scores.softmax(-1).nan_to_num(0.0).mean(1))
    return torch.stack(found, 1)
