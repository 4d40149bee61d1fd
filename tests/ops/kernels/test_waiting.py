"""Counters that threads share, and waiting for them."""

import ctypes

import pytest

pytest.importorskip("numba")

import numba
import numpy as np

from regard.ops.kernels import waiting


def test_current_number_leaves_a_counter_as_it_is():
    @numba.njit
    def call(address):
        return waiting.current_number(address)

    counter = np.array([5])
    assert [call(counter.ctypes.data) for _ in range(2)] == [5, 5]
    assert counter[0] == 5


def test_wait_for_lets_others_run_until_a_counter_is_within_its_bounds():
    @numba.njit
    def call(counter, least, most, pause):
        waiting.wait_for(counter, least, most, pause)

    counter, called = np.array([4]), []

    def other():
        called.append(int(counter[0]))
        counter[0] = 2 if len(called) > 1 else 7  # 7 is too many
        return 0

    pause = ctypes.CFUNCTYPE(ctypes.c_int)(other)
    call(counter.ctypes.data, 3, 5, 0)  # within
    counter[0] = 0
    call(counter.ctypes.data, 1, 3, ctypes.cast(pause, ctypes.c_void_p).value)
    assert called == [0, 7]
