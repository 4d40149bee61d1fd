"""Kernels one after the other in one call: in order, each once, in any number of threads."""

import pytest
import torch

pytest.importorskip("numba")

import numpy as np

from regard.ops.kernels import head_norms, sequencing
from regard.ops.kernels.chaining import Matrix, Norm, Product, prepare
from regard.ops.kernels.sequencing import KernelCall
from regard.ops.kernels.threads import launch, yield_address

WIDTH = 64


def program_of(calls):
    """The record of a call, and the memory that it reads."""
    memory = np.array(calls, np.int64)
    return sequencing.PACKED.pack(len(calls), memory.ctypes.data, yield_address()), memory


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
    running = np.zeros((count, 8), np.int64)
    at = [x.data_ptr() for x in rows]
    records = [
        chain.record(1, threads, line.ctypes.data, scratch.ctypes.data, places)
        for chain, line, *places in zip(chains, counters, at, at[1:], strict=False)
    ]
    data, memory = program_of([
        KernelCall(chain.address, np.frombuffer(record, np.uint8).ctypes.data, line.ctypes.data, 0)
        for chain, record, line in zip(chains, records, running, strict=True)
    ])  # fmt: skip
    launch(sequencing.address(), data, threads)
    assert memory.shape == (count, len(KernelCall._fields))
    assert not running.any()
    error, theirs = ((x.double() - expected).square().mean().sqrt() for x in (rows[-1], plain))
    assert error <= 2 * theirs


@pytest.mark.parametrize("threads", [1, 2, 6])
def test_a_kernel_for_one_thread_runs_once(threads):
    """Norms in place: with each one, a row is multiplied by the weight again."""
    rows, weight = torch.ones(2, 1, 8), torch.full((8,), 3.0)
    record = head_norms.record(((x.data_ptr(), 1, 8), Norm(weight, 8.0)) for x in rows)
    running, taken = np.zeros((2, 8), np.int64), np.zeros((2, 8), np.int64)
    where = np.frombuffer(record, np.uint8).ctypes.data
    address = int(head_norms.kernel(False).address)
    data, _memory = program_of([
        KernelCall(address, where, running[i].ctypes.data, taken[i].ctypes.data) for i in range(2)
    ])  # fmt: skip
    launch(sequencing.address(), data, threads)
    once = 3.0 / (1.0 + 8.0) ** 0.5  # of ones: their mean square is 1, and 8 is added
    twice = 3.0 * once / (once**2 + 8.0) ** 0.5
    assert rows.flatten().tolist() == pytest.approx([twice] * 16, rel=1e-5)
    assert [*taken[:, 0]] == [threads] * 2
