"""What a prefill kernel is compiled for (`Panel`), and what one call of it is given (`Prefill`)."""

import struct
from typing import Any, NamedTuple

import numpy as np

SIDE = 32  # keys, queries, or columns of a block of a product: two AMX tiles each way
BLOCK = 128  # keys whose scores are computed before their values are read: they stay in the cache
LANES = 16  # float32 elements of a vector: both instructions for bfloat16 belong to AVX-512
PARTS = 4  # blocks of queries of a task, at least: they share what is read of keys and values
RISE = 8.0  # powers of 2 that a score may be above the maximum in use before sums are rescaled
TILE = 1024  # bytes of an AMX tile: 16 rows of 64 bytes
ROW = 4 * SIDE  # bytes of a row of scores or sums: one float32 for each query of a block
HALVES = (0, 64)  # byte offsets of the two vectors of a row
POWER = (  # coefficients of 2**f on [0, 1], lowest power first: minimax, relative error 2**-13.7
    0.99992526, 0.69583350, 0.22606720, 0.07802454,
)  # fmt: skip


class Panel(NamedTuple):
    """The shape of a prefill kernel's loops. Each value is a constant in its machine code."""

    width: int  # elements of a query and of a key, D: a multiple of 16
    value_width: int  # elements of a value, Dv: a multiple of 16
    amx: bool  # products by AMX tiles; otherwise by AVX-512's dot products of bfloat16 pairs
    wide: bool  # the output is float32; otherwise bfloat16
    full: bool = False  # q, k and v are float32, read where they lie and multiplied by FMA
    machine: int = LANES  # float32 elements of a vector of the processor, where the panel is full

    @property
    def lanes(self) -> int:
        """Float32 elements of a vector."""
        return LANES

    @property
    def steps(self) -> int:
        """Blocks of columns of a query; the last one is padded with zeros."""
        return -(-self.width // SIDE)

    @property
    def strips(self) -> int:
        """Blocks of columns of a value; the last one is padded with zeros."""
        return -(-self.value_width // SIDE)

    @property
    def key_bytes(self) -> int:
        """Bytes of `SIDE` packed keys."""
        return 2 * TILE * self.steps

    @property
    def value_bytes(self) -> int:
        """Bytes of `SIDE` packed values."""
        return 2 * TILE * self.strips

    @property
    def sums_at(self) -> int:
        """The offset of a block's sums, after its packed queries: a row of words for each number of
        a query, or for each pair."""
        return ROW * self.width if self.full else 2 * TILE * self.steps

    @property
    def rows(self) -> int:
        """Keys, or columns of values, whose products with `together` stay in registers: AVX-512 has
        32 of them, AVX2 has 16 of half the length."""
        return 8 if self.machine == LANES else 4

    @property
    def together(self) -> tuple[tuple[int, ...], ...]:
        """Offsets of the vectors of a row of queries, divided into those multiplied at once."""
        return (HALVES,) if self.machine == LANES else tuple((each,) for each in HALVES)

    @property
    def read(self) -> int:
        """Bytes of one element of q, k and v."""
        return 4 if self.full else 2

    @property
    def state_at(self) -> int:
        """The offset of a block's maxima, after its sums; the totals are the next row."""
        return self.sums_at + ROW * SIDE * self.strips

    @property
    def part_bytes(self) -> int:
        """Bytes of a block of queries: packed, their sums, maxima and totals."""
        return self.state_at + 2 * ROW

    @property
    def item(self) -> int:
        """Bytes of one element of the output."""
        return 4 if self.wide else 2


class Prefill(NamedTuple):
    """One call of a kernel. Addresses are in bytes, strides in elements of their tensor."""

    pairs: int  # key heads of all sequences that are attended in this call
    first: int  # number of the first of them
    kv_heads: int  # key heads of a sequence, G
    group: int  # query heads that share a key head
    queries: int  # queries of a sequence, L
    keys: int  # keys of a sequence, S
    q: int  # address of the queries [B, H, L, D]
    q_batch: int
    q_head: int
    q_row: int
    k: int  # address of the keys [B, G, S, D]
    k_batch: int
    k_head: int
    k_row: int
    v: int  # address of the values [B, G, S, Dv]
    v_batch: int
    v_head: int
    v_row: int
    out: int  # address of the output [B, H, L, Dv]
    out_batch: int
    out_head: int
    out_row: int
    starts: int  # address of the first visible key of each query, int32, padded to whole blocks
    stops: int  # address of one past the last visible key of each query, the same
    limits_batch: int  # stride of both from row to row of the batch
    sinks: int  # address of the sinks of the query heads in float32, times log2(e); 0 without
    state: int  # address of [B, H, 2, L padded]: maxima and totals in float32; 0 if not wanted
    packed_keys: int  # address of [pairs, S / 32] packed groups of keys
    packed_values: int  # the same of values
    counters: int  # address of the int64 counters of packing and of attending: tasks, threads
    scratch: int  # address of the threads' scratch
    scratch_bytes: int  # of a thread
    palette: int  # address of the shapes of the AMX tiles
    blocks: int  # blocks of queries of one head in a task
    scale: float  # of the scores, times log2(e): the kernel computes powers of 2


class Gradients(NamedTuple):
    """One call of the kernel of gradients, which are contiguous; otherwise as `Prefill`."""

    tasks: int  # query heads of all sequences
    heads: int  # query heads of a sequence, H
    group: int  # query heads that share a key head
    queries: int  # queries of a sequence, L
    keys: int  # keys of a sequence, S
    q: int
    q_batch: int
    q_head: int
    q_row: int
    k: int
    k_batch: int
    k_head: int
    k_row: int
    v: int
    v_batch: int
    v_head: int
    v_row: int
    slope: int  # address of the gradient of the output [B, H, L, Dv]
    slope_batch: int
    slope_head: int
    slope_row: int
    starts: int
    stops: int
    limits_batch: int
    lses: int  # address of the log-sum-exps [B, H, L padded] in float32, times log2(e)
    totals: int  # address of the sums of outputs times their gradients, the same
    of_q: int  # address of the gradient of the queries [B, H, L padded, D]
    of_k: int  # address of each query head's part of that of the keys [B, H, S padded, D]
    of_v: int  # the same of the values [B, H, S padded, Dv]
    counters: int  # address of the int64 counters of tasks and of threads
    scratch: int
    scratch_bytes: int
    scale: float  # of the scores
    power: float  # the same, times log2(e)


def _record(call: Any) -> tuple[np.dtype[Any], struct.Struct]:
    """A call's fields as the kernel reads them, and as Python packs them: numbers, then floats."""
    kinds = [np.float32 if each is float else np.int64 for each in call.__annotations__.values()]
    found = np.dtype(list(zip(call._fields, kinds, strict=True)), align=True)
    floats = kinds.count(np.float32)
    return found, struct.Struct(f"{len(kinds) - floats}q{floats}f{4 * (floats % 2)}x")


PREFILL, PACKED_PREFILL = _record(Prefill)
GRADIENTS, PACKED_GRADIENTS = _record(Gradients)
