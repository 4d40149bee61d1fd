"""Attention of few queries over many keys on a CPU, compiled by LLVM through numba.

One pass: tasks (some keys of one head) are claimed by threads; each goes through its keys in blocks
of dots, softmax and gather, asking for the next keys meanwhile; the last task of a head merges in a
fixed order. FlashAttention's online softmax (arXiv:2205.14135) with Flash-Decoding's split.
"""

import functools
import math
import struct
from typing import no_type_check

import numpy as np
from numba import carray, types

from regard.ops.kernels.compiling import compiled_from
from regard.ops.kernels.lanes import (
    claim,
    dots,
    fetch,
    floats,
    gather,
    peak,
    power,
    sums_in_registers,
    tidy,
    weigh,
    widen,
)

LOW = np.float32(-1e38)  # where a running maximum starts: -inf - LOW is -inf, never NaN
LOG2E = np.float32(math.log2(math.e))
HIDDEN = np.float32(-math.inf)

# the arguments: int64, the last a float32
(B, G, M, S, Q, QB, QG, QM, K, KB, KG, KS, V, VB, VG, VS, A, AB, AG, AM, OUT, LSE, COUNTERS, PARTS,
 SCRATCH, SPLITS, CHUNK, SCALE) = range(28)  # fmt: skip
ARGUMENTS = struct.Struct("27qf4x")


@functools.cache
@no_type_check
def kernel(rows, D, Dv, half, joined, biased, room, W):
    """For tiles of `rows` queries, blocks of `room` keys and vectors of W lanes; `joined`: v is
    k[..., :Dv]."""
    size = 2 if half else 4
    keys = min(W, 16 if rows == 1 else 8 if rows < 4 and W != 8 else 4)
    fits = [c for c in range(W, Dv + 1, W) if Dv % c == 0 and c * rows <= sums_in_registers(W) * W]
    strip = max([c for c in fits if not half or c == Dv or c % (2 * W) == 0], default=Dv)
    strips = Dv // strip
    pieces = 2 * strips if joined else 1  # the next keys are asked for during so many gathers
    soon, vbytes = -(-D * size // pieces // 64) * 64, Dv * size

    def run(data):
        a = carray(data, 28)
        scale = a.view(np.float32)[2 * SCALE]
        mp = (a[M] + rows - 1) // rows * rows
        part_size = 4 * mp * (Dv + 2 * W)  # a task's sums, maxima and totals
        tops_at, totals_at = 4 * mp * Dv, 4 * mp * (Dv + W)
        q = a[SCRATCH] + claim(a[COUNTERS] + 8) * 4 * mp * (D + room)
        s = q + 4 * mp * D
        splits = a[SPLITS]
        while True:
            task = claim(a[COUNTERS])
            if task >= a[B] * a[G] * splits:
                break
            pair = task // splits
            batch, head = pair // a[G], pair % a[G]
            start = (task - pair * splits) * a[CHUNK]
            stop = min(a[S], start + a[CHUNK])
            k = a[K] + size * (batch * a[KB] + head * a[KG])
            v = a[V] + size * (batch * a[VB] + head * a[VG])
            ks, vs = size * a[KS], size * a[VS]
            part = a[PARTS] + task * part_size
            sums, tops, totals = floats(part), floats(part + tops_at), floats(part + totals_at)
            for i in range(mp * (Dv + 2 * W)):
                sums[i] = np.float32(0)
            for i in range(mp):
                tops[i] = LOW
                row = a[Q] + size * (batch * a[QB] + head * a[QG] + min(i, a[M] - 1) * a[QM])
                widen(W, D, half, row, q + 4 * i * D, scale)

            for j in range(start, stop, room):
                n = min(room, stop - j)
                if biased:  # keys that nobody sees are not read
                    seen = False
                    for i in range(a[M] if a[AM] else 1):
                        bias = floats(a[A] + 4 * (batch * a[AB] + head * a[AG] + i * a[AM] + j))
                        for u in range(n):
                            seen |= bias[u] != HIDDEN
                    if not seen:
                        continue
                for r in range(0, mp, rows):
                    for i in range(0, n, keys):
                        if r == 0 and not joined:
                            for u in range(i, min(n, i + keys)):
                                fetch(vbytes, v + (j + u) * vs)
                        dots(W, rows, keys, D, half, room, q + 4 * r * D, k + j * ks, ks, i, n - 1,
                             s + 4 * r * room)  # fmt: skip

                for i in range(a[M]):
                    at = s + 4 * i * room
                    si = floats(at)
                    if biased:
                        bias = floats(a[A] + 4 * (batch * a[AB] + head * a[AG] + i * a[AM] + j))
                        for u in range(n):
                            si[u] += bias[u] * LOG2E
                    for u in range(n, room):
                        si[u] = HIDDEN
                    old, tops[i] = tops[i], peak(W, room, at, tops[i])
                    if tops[i] != old:
                        shrink = power(W, old - tops[i])
                        totals[i] *= shrink
                        for d in range(Dv):
                            sums[i * Dv + d] *= shrink
                    totals[i] += weigh(W, room, at, tops[i])

                ahead, piece = k + (j + room) * ks, 0
                for r in range(0, mp, rows):
                    for c in range(0, Dv, strip):
                        at, to, p = v + j * vs + size * c, part + 4 * (r * Dv + c), s + 4 * r * room
                        if piece < pieces:
                            gather(W, rows, strip, Dv, half, room, soon, n, p, at, vs, to,
                                   ahead + piece * soon, ks)  # fmt: skip
                        else:
                            gather(W, rows, strip, Dv, half, room, 0, n, p, at, vs, to, ahead, ks)
                        piece += 1

            if claim(a[COUNTERS] + 16 + 8 * pair) < splits - 1:
                continue
            part = a[PARTS] + pair * splits * part_size
            for i in range(a[M]):
                top, total = LOW, np.float32(0)
                for p in range(splits):
                    top = max(top, floats(part + p * part_size + tops_at)[i])
                for p in range(splits):
                    at = part + p * part_size
                    total += floats(at + totals_at)[i] * power(W, floats(at + tops_at)[i] - top)
                sums = floats(part + 4 * i * Dv)
                for p in range(splits):
                    at = part + p * part_size
                    c = power(W, floats(at + tops_at)[i] - top)
                    c = c / total if total != 0 else np.float32(0)
                    these = floats(at + 4 * i * Dv)
                    for d in range(Dv):
                        sums[d] = c * these[d] + (sums[d] if p else np.float32(0))
                lse = floats(a[LSE] + 4 * (pair * a[M] + i))
                lse[0] = (top + np.float32(math.log2(total))) / LOG2E if total != 0 else HIDDEN
                tidy(W, Dv, half, part + 4 * i * Dv, a[OUT] + 4 * (pair * a[M] + i) * Dv)

    return compiled_from(run, types.void(types.CPointer(types.int64)))


@functools.cache
def compiled(m, d, dv, half, joined, biased, lanes):
    """The kernel for `m` rows and vectors of so many lanes: tiles with least padding, then the
    greatest; blocks of at least 4 KiB of keys. Gives the rows of a tile, the keys of a block, and
    the kernel's address."""
    most = 2 if lanes == 8 else 4 if half and dv % (2 * lanes) else 6
    rows = min(range(1, most + 1), key=lambda r: (-(-m // r) * r, -r))
    room = next(x for x in (16, 32, 64) if x == 64 or x * d * (2 if half else 4) >= 4096)
    return rows, room, kernel(rows, d, dv, int(half), joined, biased, room, lanes).address
