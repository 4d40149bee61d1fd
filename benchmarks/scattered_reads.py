"""How fast is memory read in pieces that lie apart, as pages of a cache do?

    python benchmarks/scattered_reads.py              pieces of 8, 16 and 32 KiB
    python benchmarks/scattered_reads.py --mib 64     of a smaller memory

Each piece is what a page of 64 tokens has of one key head of 128 channels: 8 KiB of codes of 8
bits, 16 KiB of bfloat16, 32 KiB of float32. A number of each cache line is read, so that nothing
but memory takes time. Pieces are read in the order of the memory, in a random order, and as those
of sequences that took turns: all pieces of the first sequence, then of the next one. A step that
waits for memory alone is no nearer to one over contiguous keys than these rates are to each other.
Then blocks of 64 KiB in order, each as one to eight streams: lines of so many parts in turns.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
from common import THREADS, finish, interleave, introduce

SEQUENCES = 16  # that took turns
LINE = 8  # numbers of 64 bits
BLOCK = 1 << 13  # numbers, 64 KiB: the weights of a task of `row_products.py`
STREAMS = 1, 2, 4, 8


@numba.njit(parallel=True)  # type: ignore[untyped-decorator]
def read_pieces(memory: Any, order: Any, piece: int, sums: Any) -> None:
    """Read one number of each cache line of the pieces, in order; each thread an equal share."""
    share = len(order) // len(sums)
    for thread in numba.prange(len(sums)):
        total = np.int64(0)
        for i in range(thread * share, (thread + 1) * share):
            start = order[i] * piece
            for j in range(0, piece, LINE):
                total += memory[start + j]
        sums[thread] = total


def reader(streams: int) -> Callable[[Any, Any], None]:
    """A function that reads memory as so many streams, a constant in its machine code."""
    apart = BLOCK // streams

    @numba.njit(parallel=True)  # type: ignore[untyped-decorator]
    def read(memory: Any, sums: Any) -> None:
        """Read one number of each cache line, of a block's parts in turns; each thread a share."""
        share = len(memory) // BLOCK // len(sums)
        for thread in numba.prange(len(sums)):
            total = np.int64(0)
            for block in range(thread * share, (thread + 1) * share):
                for line in range(block * BLOCK, block * BLOCK + apart, LINE):
                    for part in range(streams):
                        total += memory[line + part * apart]
            sums[thread] = total

    return read  # type: ignore[no-any-return]


def orders(pieces: int) -> dict[str, Any]:
    """The numbers of the pieces in every order."""
    turns = [np.arange(first, pieces, SEQUENCES) for first in range(SEQUENCES)]
    return {
        "in order": np.arange(pieces),
        "random": np.random.default_rng(0).permutation(pieces),
        "took turns": np.concatenate(turns),
    }


def rates(kib: int, memory: Any, rounds: int) -> dict[str, float]:
    """Bytes per second in pieces of so many KiB."""
    piece, sums = kib << 7, np.zeros(THREADS, np.int64)
    runs: dict[str, Callable[[], Any]] = {
        name: partial(read_pieces, memory, order, piece, sums)
        for name, order in orders(len(memory) // piece).items()
    }
    times = interleave(runs, rounds=rounds, sample=0.0)
    return {name: memory.nbytes / statistics.median(each) for name, each in times.items()}


def rates_of_streams(memory: Any, rounds: int) -> dict[int, float]:
    """Bytes per second as so many streams."""
    sums = np.zeros(THREADS, np.int64)
    runs = {streams: partial(reader(streams), memory, sums) for streams in STREAMS}
    times = interleave(runs, rounds=rounds, sample=0.0)
    return {streams: memory.nbytes / statistics.median(each) for streams, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="of memory, more than the caches")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    introduce("numba")
    memory = np.ones(options.mib << 17, np.int64)
    results: list[dict[str, Any]] = []
    numba.set_num_threads(THREADS)
    for kib in (8, 16, 32):
        found = rates(kib, memory, options.rounds)
        slower = {name: found["in order"] / rate for name, rate in found.items()}
        print(f"{kib:3} KiB: in order {found['in order'] / 1e9:.1f} GB/s, takes longer by "
              f"{slower['random']:.2f} at random, {slower['took turns']:.2f} in turns")  # fmt: skip
        results.append({"kib": kib, "bytes_per_second": found})
    by_streams = rates_of_streams(memory, options.rounds)
    print("streams:", ", ".join(f"{n} {rate / 1e9:.1f} GB/s" for n, rate in by_streams.items()))
    results.append({"streams": [*by_streams], "bytes_per_second": [*by_streams.values()]})
    finish("scattered_reads", results)


if __name__ == "__main__":
    main()
