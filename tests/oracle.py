"""The judge: attention by plain loops over lists in float64. It shares nothing with what it judges.

Everything here is the definition, cell by cell: a score is `softcap(scale * q.k) + bias`, a hidden
cell has none, a sink is one more key with no value, and a query that sees nothing reads zeros.
Products are split into two floats and summed by `math.fsum`, so that what the judge itself rounds
is a last digit here and there, and float64 can be judged too.
"""

import math
from collections.abc import Callable, Iterable
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
    out, weights, lse, largest = [], [], [], 0.0
    for i, query in enumerate(q):
        scores = []
        for j, key in enumerate(k):
            if not visible(i, j):
                scores.append(-math.inf)
                continue
            factor = len(query) ** -0.5 if scale is None else scale
            score = factor * dot(query, key)
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            added = 0.0 if bias is None else bias(i, j)
            scores.append(score + added)
            size = abs(factor) * dot(map(abs, query), map(abs, key)) + abs(added)
            largest = max(largest, size)
        powers, total, log_sum = exponentials(scores, sink)
        out.append([dot(powers, column) / total for column in zip(*v, strict=True)])
        shares = [power / total for power in powers]
        weights.append(shares)
        lse.append(log_sum)
    return Judged(out, weights, lse, largest)


def exponentials(scores: list, sink: float | None) -> tuple[list, float, float]:
    """Each score's exponential, their sum (the sink's with them), and the log of the true sum.

    Where nothing is seen, the sum is 1 and its log minus infinity: shares of nothing are nothing.
    """
    everything = scores if sink is None else [*scores, sink]
    top = max(everything, default=-math.inf)
    if top == -math.inf:
        return [0.0] * len(scores), 1.0, -math.inf
    powers = [math.exp(score - top) for score in everything]
    total = math.fsum(powers)
    return powers[: len(scores)], total, top + math.log(total)


def dot(a: Iterable[float], b: Iterable[float]) -> float:
    """The sum of the products, rounded once."""
    return math.fsum(piece for x, y in zip(a, b, strict=True) for piece in product(x, y))


def product(a: float, b: float) -> tuple[float, float]:
    """`a * b` as a float and what it was rounded by (Dekker's product)."""
    whole = a * b
    (a_high, a_low), (b_high, b_low) = halves(a), halves(b)
    missing = whole - a_high * b_high - a_low * b_high - a_high * b_low
    return whole, a_low * b_low - missing


def halves(x: float) -> tuple[float, float]:
    """A float as the sum of two of 26 bits (Veltkamp's splitting)."""
    shifted = 134_217_729.0 * x  # 2 ** 27 + 1
    high = shifted - (shifted - x)
    return high, x - high


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
    """The second judge, for sizes that loops are too slow for: the same, in numpy's float64.

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
