"""Attention by plain loops over lists. It shares no code with the library that it is compared with.

Everything here is the definition, cell by cell: a score is `softcap(scale * q.k) + bias`, a hidden
cell has none, a sink is one more key with no value, and a query that sees nothing reads zeros.
Numbers are decimals of 28 digits, rounded to float64 at the very end, so that float64 can be judged
too.
"""

import math
from collections.abc import Callable
from decimal import Decimal
from operator import mul
from typing import NamedTuple

import numpy as np

Rule = Callable[[int, int, int, int], bool]  # (b, h, row, column) -> may look
Bias = Callable[[int, int, int, int], float]


class Judged(NamedTuple):
    """What attention is: `out` [B][H][L][Dv], `weights` [B][H][L][S] and `lse` [B][H][L].

    `lse` counts the sinks. `largest` is S of the error bound: the largest visible sum of
    |scale * q_i * k_i|, plus |bias|.
    """

    out: list
    weights: list
    lse: list
    largest: float


def attention(
    q: list,
    k: list,
    v: list,
    *,
    visible: Rule = lambda b, h, i, j: True,
    scale: float | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: list | None = None,
) -> Judged:
    """Attend q [B][H][L][D] to k [B][G][S][D] and v [B][G][S][Dv].

    `visible` and `bias` are asked about rows and columns of the rectangle, counted from 0.
    """
    rows = [
        [
            judge_head(
                q[b][h],
                *(side[b][h * len(side[b]) // len(q[b])] for side in (k, v)),
                visible=lambda i, j, b=b, h=h: visible(b, h, i, j),
                bias=None if bias is None else lambda i, j, b=b, h=h: bias(b, h, i, j),
                scale=scale,
                softcap=softcap,
                sink=None if sinks is None else sinks[h],
            )
            for h in range(len(q[b]))
        ]
        for b in range(len(q))
    ]
    out, weights, lse = ([[head[part] for head in heads] for heads in rows] for part in range(3))
    largest = max((head[3] for heads in rows for head in heads), default=0.0)
    return Judged(out, weights, lse, largest)


def judge_head(q, k, v, *, visible, bias, scale, softcap, sink) -> Judged:
    """One head of one row of the batch: q [L][D], k [S][D], v [S][Dv]."""
    q, k, v = ([[Decimal(x) for x in row] for row in rows] for rows in (q, k, v))
    columns = list(zip(*v, strict=True))
    out, weights, lse, largest = [], [], [], 0.0
    for i, query in enumerate(q):
        factor = Decimal(len(query) ** -0.5 if scale is None else scale)
        scores = []
        for j, key in enumerate(k):
            if not visible(i, j):
                scores.append(None)
                continue
            products = [factor * x * y for x, y in zip(query, key, strict=True)]
            added = Decimal(0 if bias is None else bias(i, j))
            scores.append(capped(sum(products), softcap) + added)
            largest = max(largest, float(sum(map(abs, products)) + abs(added)))
        shares, log_sum = softmax(scores, sink)
        out.append([float(sum(map(mul, shares, column))) for column in columns])
        weights.append([float(share) for share in shares])
        lse.append(log_sum)
    return Judged(out, weights, lse, largest)


def capped(score: Decimal, softcap: float | None) -> Decimal:
    """`softcap * tanh(score / softcap)`, the tanh by its exponentials."""
    if softcap is None:
        return score
    power = (2 * score / Decimal(softcap)).exp()
    return Decimal(softcap) * (power - 1) / (power + 1)


def softmax(scores: list, sink: float | None) -> tuple[list, float]:
    """Shares of the scores, hidden ones (None) 0, and the log of the sum they are shares of."""
    everything = [score for score in scores if score is not None]
    if sink is not None:
        everything.append(Decimal(sink))
    if not everything:
        return [Decimal(0)] * len(scores), -math.inf
    top = max(everything)
    total = sum((score - top).exp() for score in everything)
    shares = [Decimal(0) if x is None else (x - top).exp() / total for x in scores]
    return shares, float(top + total.ln())


def wide_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    keep: np.ndarray,
    bias: np.ndarray | float = 0.0,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, float]:
    """The same in numpy's float64, for sizes that loops are too slow for.

    `keep` and `bias` broadcast to [B, H, L, S]. Gives the output and S of the error bound.
    """
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    factor = q.shape[-1] ** -0.5
    scores = factor * np.einsum("bhid,bhjd->bhij", q, k)
    sizes = factor * np.einsum("bhid,bhjd->bhij", abs(q), abs(k)) + abs(bias)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(keep, scores + bias, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, column], axis=-1)
    top = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = powers.sum(-1, keepdims=True)
    shares = powers / np.where(total == 0, 1.0, total)
    out = np.einsum("bhij,bhjd->bhid", shares[..., : k.shape[2]], v)
    return out, float(np.where(keep, sizes, 0.0).max(initial=0.0))
