"""Kernels one after the other in one call: in order, each once, in any number of threads."""

import pytest
import torch

pytest.importorskip("numba")

import numpy as np

from regard.ops.kernels import head_norms
from regard.ops.kernels.chaining import Matrix, Norm, Product, prepare
from regard.ops.kernels.sequencing import Kernel, KernelSequence, lines

WIDTH = 64


@pytest.mark.parametrize("threads", [1, 2, 6])
def test_each_kernel_reads_the_results_of_the_one_before(threads):
    """Products of matrices that do not commute, each with the result of the product before it."""
    count = 40
    weights = [torch.randn(WIDTH, WIDTH) / 8 for _ in range(count)]
    chains = [prepare(1, 1, Product(1, Matrix(weight), 2)) for weight in weights]
    rows = torch.randn(count + 1, WIDTH)
    expected, plain = rows[0].double(), rows[0]
    for weight in weights:
        expected, plain = weight.double() @ expected, weight @ plain
    of_counters, of_scratch = chains[0].counter_bytes(threads), chains[0].scratch_bytes(1)
    counters = np.zeros((count, of_counters // 8), np.int64)
    scratch = np.zeros(threads * of_scratch, np.uint8)
    at = [x.data_ptr() for x in rows]
    records = [
        chain.record(1, threads, line.ctypes.data, scratch.ctypes.data, places)
        for chain, line, *places in zip(chains, counters, at, at[1:], strict=False)
    ]
    sequence = KernelSequence([
        Kernel(chain.address, record, False) for chain, record in zip(chains, records, strict=True)
    ])  # fmt: skip
    for _ in range(2):  # any number of calls: the counters of the products are zeroed by these
        counters[:] = 0
        rows[1:] = 0
        sequence.run(threads)
        error, theirs = ((x.double() - expected).square().mean().sqrt() for x in (rows[-1], plain))
        assert error <= 2 * theirs


@pytest.mark.parametrize("threads", [1, 2, 6])
def test_a_kernel_for_one_thread_runs_once(threads):
    """Norms in place: with each one, a row is multiplied by the weight again."""
    rows, weight = torch.ones(2, 1, 8), torch.full((8,), 3.0)
    record = head_norms.record(((x.data_ptr(), 1, 8), Norm(weight, 8.0)) for x in rows)
    norms = Kernel(int(head_norms.kernel(False).address), record, True)
    KernelSequence([norms, norms]).run(threads)
    once = 3.0 / (1.0 + 8.0) ** 0.5  # of ones: their mean square is 1, and 8 is added
    twice = 3.0 * once / (once**2 + 8.0) ** 0.5
    assert rows.flatten().tolist() == pytest.approx([twice] * 16, rel=1e-5)


def test_records_change_with_their_array():
    weights = [Norm(torch.full((8,), float(n)), 0.0) for n in range(6)]
    rows = torch.ones(6, 1, 8)
    code = int(head_norms.kernel(False).address)
    sequence = KernelSequence([
        Kernel(code, head_norms.record([((row.data_ptr(), 1, 8), norm)]), True)
        for row, norm in zip(rows, weights, strict=True)
    ])  # fmt: skip
    second, fourth = sequence.records(1, 2, head_norms.RECORD)[:2]
    second["each"][0]["weight"] = weights[5].weight.data_ptr()
    fourth["each"][0]["rows"] = 0
    sequence.run(threads=1)
    assert rows[:, 0, 0].tolist() == pytest.approx([0, 5, 2, 1, 4, 5])


@pytest.mark.parametrize("count", [0, 1, 64, 1000])
def test_memory_begins_with_a_cache_line(count):
    memory = lines(count)
    assert len(memory) == count
    assert not memory.any()
    assert memory.ctypes.data % 64 == 0
