"""The decoding kernel in NumPy: the same tiles, phases and order of sums, to read and to test with.

Only tests run it. Its inputs are float32; those of bfloat16 are widened first, which is exact, and
codes are given to `dequantized` first, which is what the kernel does with each block of them
where the queries are float32.

How much the two may differ: every float32 operation here is one of the kernel's, in its order. A
product that the kernel adds with one rounding (`fma`) is exact here in float64; the sum is rounded
to float64, then to float32. That differs from one rounding in about one of 2**29 sums, by one unit
in the last place. Almost all outputs therefore have the same bits; the others may differ by a few
units in the last place of the largest value. The log-sum-exp may differ by two units more, since
NumPy's logarithm is not the C library's.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from regard.ops.kernels.tiles import (
    BFLOAT16,
    EXP2,
    HIDDEN,
    LOG2E,
    LOWEST,
    STEP,
    Format,
    KeyPages,
    Tile,
)

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class Sums(NamedTuple):
    """Attention over some of the keys, not yet divided by its total."""

    sums: Floats  # [M, Dv]: the sum of 2**(score - maximum) times the value
    maxima: Floats  # [M]: the greatest score, in powers of 2
    totals: Floats  # [M]: the sum of 2**(score - maximum)


class Specification(NamedTuple):
    """A tile, and whether the machine adds a product with one rounding."""

    tile: Tile
    fma: bool = True

    def decode(
        self,
        q: Floats,
        k: Floats,
        v: Floats,
        bias: Floats | None,
        scale: float,
        threads: int,
        pages: KeyPages | None = None,
    ) -> tuple[Floats, Floats]:
        """q [B, G, M, D], k [B, G, S, D], v [B, G, S, Dv], bias [B, G, M, S] -> out, lse.

        With `pages`, k and v are [1, G, tokens, ...].
        """
        batch, heads, rows, _ = q.shape
        keys = k.shape[2] if pages is None else pages.keys
        ranges, length = self.tile.ranges(keys, batch * heads, threads)
        out = np.empty((batch, heads, rows, v.shape[3]), np.float32)
        lse = np.empty((batch, heads, rows), np.float32)
        for b, g in np.ndindex(batch, heads):
            added = None if bias is None else bias[b, g]
            k_of, v_of = (self.tokens(x, b, g, pages) for x in (k, v))
            parts = [
                self.task(q[b, g], k_of, v_of, added, scale, first, first + length, pages)
                for first in range(0, ranges * length, length)
            ]
            out[b, g], lse[b, g] = self.merge(parts)
        return out, lse

    def tokens(self, x: Floats, batch: int, head: int, pages: KeyPages | None) -> Floats:
        """The keys or values of one head, [S, ...]."""
        if pages is None:
            return cast("Floats", x[batch, head])
        slots = np.arange(pages.skipped, pages.skipped + pages.keys)
        at = np.asarray(pages.table)[batch, slots // pages.size] * pages.size
        return cast("Floats", x[0, head, at + slots % pages.size])

    def blocks(self, first: int, stop: int, pages: KeyPages | None) -> Iterator[tuple[int, int]]:
        """The keys of each block, all of them in one page."""
        while first < stop:
            end = min(first + self.tile.block, stop)
            if pages is not None:
                end = min(end, first + pages.size - (pages.skipped + first) % pages.size)
            yield first, end
            first = end

    def dequantized(self, codes: Bytes, scales: Floats, form: Format, width: int) -> Floats:
        """zero + scale * code, [..., bytes] and [..., 2 groups] -> [..., width]."""
        if form.bits < 8:
            steps = np.split(codes, range(form.bytes(STEP), codes.shape[-1], form.bytes(STEP)), -1)
            codes = np.concatenate([self.unpacked(step, form.bits) for step in steps], -1)
        scale, zero = (scales[..., i::2].repeat(form.group, -1)[..., :width] for i in (0, 1))
        return self.add_product(codes.astype(np.float32), scale, zero)

    def unpacked(self, step: Bytes, bits: int) -> Bytes:
        """The codes of 32 or 16 channels. Of n channels, n / 2 bytes hold the low 4 bits, byte i
        those of channels i and i + n / 2; of 6 bits, n / 4 bytes more hold the high ones, byte i
        those of channels i, i + n / 4, and so on."""
        low = step[..., : step.shape[-1] * 4 // bits]
        found = np.concatenate([low & 15, low >> 4], -1)
        if bits == 6:
            high = step[..., low.shape[-1] :]
            found |= np.concatenate([(high >> at & 3) << 4 for at in (0, 2, 4, 6)], -1)
        return found

    def task(
        self,
        q: Floats,
        k: Floats,
        v: Floats,
        bias: Floats | None,
        scale: float,
        first: int,
        stop: int,
        pages: KeyPages | None = None,
    ) -> Sums:
        """A range of one head's keys, a block at a time: q [M, D], k [S, D], v [S, Dv]."""
        rows = len(q)
        q = q * np.float32(scale * math.log2(math.e))
        part = Sums(
            np.zeros((rows, v.shape[1]), np.float32),
            np.full(rows, LOWEST),
            np.zeros(rows, np.float32),
        )
        for begin, end in self.blocks(first, min(stop, len(k)), pages):
            if bias is not None:  # keys after the last that a row may attend to are not read
                end = begin + np.max((bias[:, begin:end] != HIDDEN) * np.arange(1, 1 + end - begin))
            if begin == end:
                continue
            block = slice(begin, end)
            added = None if bias is None else bias[:, block]
            scores = self.score(q, k[block])
            weights, part = self.softmax(scores, added, part)
            part = self.gather(weights, v[block], part)
        return part

    def score(self, q: Floats, k: Floats) -> Floats:
        """[M, D] and [n, D] -> [M, n]: a vector of partial sums for each, then their sum."""
        sums = np.zeros((len(q), len(k), self.tile.lanes), np.float32)
        for columns in self.columns(q.shape[1]):
            sums = self.add_product(q[:, None, columns], k[None, :, columns], sums)
        return self.sum_of_lanes(sums)

    def softmax(self, scores: Floats, bias: Floats | None, part: Sums) -> tuple[Floats, Sums]:
        """Weights [M, block], and the part rescaled to the new maximum, its total increased."""
        if bias is not None:
            scores = scores + bias * LOG2E
        missing = self.tile.block - scores.shape[1]  # the last block may have fewer keys
        scores = np.pad(scores, ((0, 0), (0, missing)), constant_values=HIDDEN)
        maxima = np.maximum(part.maxima, scores.max(1))
        changed = maxima != part.maxima
        shrink = np.where(changed, self.exp2(part.maxima - maxima), np.float32(1))
        weights = self.exp2(scores - maxima[:, None])
        total = np.zeros((len(scores), self.tile.lanes), np.float32)
        for i in range(0, self.tile.block, self.tile.lanes):
            total = total + weights[:, i : i + self.tile.lanes]
        totals = part.totals * shrink + self.sum_of_lanes(total)
        return weights, Sums(part.sums * shrink[:, None], maxima, totals)

    def gather(self, weights: Floats, v: Floats, part: Sums) -> Sums:
        """Add the weighted values to the sums, key after key."""
        sums = part.sums
        for j, value in enumerate(v):
            sums = self.add_product(weights[:, j, None], value, sums)
        return part._replace(sums=sums)

    def merge(self, parts: list[Sums]) -> tuple[Floats, Floats]:
        """The output [M, Dv] and the log-sum-exp [M], from the parts in the order of their keys."""
        top = np.max([part.maxima for part in parts], axis=0)
        total = np.zeros_like(top)
        for part in parts:
            total = total + part.totals * self.exp2(part.maxima - top)
        visible = total != 0
        divisor = np.where(visible, total, np.float32(1))
        out = np.zeros_like(parts[0].sums)
        for part in parts:
            share = np.where(visible, self.exp2(part.maxima - top) / divisor, np.float32(0))
            out = share[:, None] * part.sums + out
        return out, np.where(visible, (top + np.log2(divisor)) / LOG2E, HIDDEN)

    def columns(self, width: int) -> list[Any]:
        """The columns of each step of a dot product, a vector each, in order.

        Keys in bfloat16 are read two vectors at a time: the even columns of both, then the odd.
        """
        lanes = self.tile.lanes
        if self.tile.k != BFLOAT16:
            return [slice(i, i + lanes) for i in range(0, width, lanes)]
        pairs = width // (2 * lanes) * 2 * lanes
        steps = [
            slice(i + odd, i + 2 * lanes, 2) for i in range(0, pairs, 2 * lanes) for odd in (0, 1)
        ]
        return steps + ([slice(pairs, width)] if width > pairs else [])

    def sum_of_lanes(self, x: Floats) -> Floats:
        """The sum along the last axis: the halves of a vector are added until one lane is left."""
        while x.shape[-1] > 1:
            half = x.shape[-1] // 2
            x = x[..., :half] + x[..., half:]
        return x[..., 0]

    def exp2(self, x: Floats) -> Floats:
        """2**x of x <= 0: a polynomial of the fraction, shifted by the integer; 0 below -127."""
        x = np.maximum(x, np.float32(-127))
        whole = np.rint(x)
        fraction, y = x - whole, np.full_like(x, EXP2[-1])
        for coefficient in EXP2[-2::-1]:
            y = self.add_product(y, fraction, np.full_like(x, coefficient))
        power = np.where(whole > -127, np.exp2(whole), np.float32(0))
        return y * power

    def add_product(self, x: Floats, y: Floats, z: Floats) -> Floats:
        """x y + z, rounded once or twice."""
        if not self.fma:
            return x * y + z
        return (x.astype(np.float64) * y + z).astype(np.float32)
