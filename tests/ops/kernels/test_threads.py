"""The threads that run a kernel: torch's, Python's, those of child processes."""

import _ctypes
import os
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("numba")

from kernel_checks import run_python
from regard.ops.kernels import threads
from regard.ops.kernels.launching import decode
from regard.ops.kernels.threads import _openmp
from regard.ops.kernels.vectors import machine_lanes


@pytest.fixture
def wanted(monkeypatch):
    """What `found` returns with torch's threads; these are hidden then."""
    torch.set_num_threads(2)
    result = found()
    monkeypatch.setattr(threads, "_openmp", lambda: None)
    return result


Q, K = torch.randn(1, 3, 3, 32), torch.randn(1, 3, 2000, 32)


def found():
    return decode(Q, K, K, scale=0.1)[0]


def test_without_torchs_threads_those_of_python_are_used(wanted):
    assert all(found().equal(wanted) for _ in range(20))


def test_callers_in_several_threads_share_pythons_threads(wanted):
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda _: found(), range(40)))
    assert all(each.equal(wanted) for each in results)


def test_a_thread_that_does_not_come_is_not_waited_for(wanted, monkeypatch):
    """As beside a busy program; it runs nothing later, when the memory is in other use."""
    release, ran, pool = threading.Event(), [], ThreadPoolExecutor(1)
    real = threads._callable
    monkeypatch.setattr(threads, "_pool", lambda count: pool)
    monkeypatch.setattr(threads, "_callable", lambda address: recording(real(address), ran))
    pool.submit(release.wait, 60)
    try:
        assert found().equal(wanted)
    finally:
        release.set()
        pool.shutdown()
    assert ran == [threading.current_thread()]


def recording(run, ran):
    return lambda data: (ran.append(threading.current_thread()), run(data))[1]


class Exhausted(ThreadPoolExecutor):
    """A system that starts no thread; the work lies in the queue all the same."""

    def _adjust_thread_count(self):
        raise RuntimeError("can't start new thread")


def test_where_no_thread_can_be_started_one_does_all(wanted, monkeypatch):
    pool = Exhausted(1)
    monkeypatch.setattr(threads, "_pool", lambda count: pool)
    assert found().equal(wanted)
    while not pool._work_queue.empty():  # what a later thread would find there does nothing
        pool._work_queue.get().run()


@pytest.mark.parametrize("library", [None, "libtorch_cpu.so", "libtorch_cpu.dylib"])
def test_a_torch_without_gnus_openmp(monkeypatch, tmp_path, library):
    """Windows has other names of files; a library without the function stands for macOS."""
    (tmp_path / "lib").mkdir()
    if library is not None:
        (tmp_path / "lib" / library).symlink_to(_ctypes.__file__)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    assert _openmp.__wrapped__() is None


def test_a_system_without_fork(monkeypatch):
    monkeypatch.delattr(os, "register_at_fork")
    assert callable(runpy.run_path(threads.__file__)["launch"])


def test_torchs_own_threads_are_found():
    assert _openmp() is not None
    assert machine_lanes() in (4, 8, 16)


FORKS = """
import multiprocessing, os, signal, sys, threading, torch
from regard.ops.kernels.launching import decode

torch.set_num_threads(2)
q, k = torch.randn(1, 3, 3, 32), torch.randn(1, 3, 2000, 32)
wanted = decode(q, k, k, scale=0.1)[0]  # with OpenMP's threads, which no child has
torch.randn(300, 300) @ torch.randn(300, 300)

def same(*ignored):  # a loader's worker has one thread, and so another order of sums
    return all(torch.allclose(decode(q, k, k, scale=0.1)[0], wanted, atol=1e-6) for _ in range(5))

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for ever is killed
        os._exit(0 if work() else 1)
    return os.waitpid(child, 0)[1] == 0

def in_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(same()))
    thread.start()
    thread.join()
    return found == [True]

assert in_child(same), "a forked child"
assert in_child(lambda: same() and in_child(same)), "a child of a child, after it has decoded"
assert in_child(in_thread), "a thread of a child"
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map_async(same, range(4)).get(60) == [True] * 4
loader = torch.utils.data.DataLoader(range(4), num_workers=2, collate_fn=same, timeout=60)
assert list(loader) == [True] * 4
assert same(), "the parent, afterwards"
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("hidden", [False, True], ids=["torch's threads", "Python's threads"])
def test_forked_children_neither_wait_for_ever_nor_crash(hidden):
    hide = "from regard.ops.kernels import threads\nthreads._openmp = lambda: None\n"
    run_python(hide * hidden + FORKS)


SPAWN = """
import multiprocessing, torch
from kernel_checks import check

def work(seed):
    torch.manual_seed(seed)
    check(torch.randn(1, 2, 1, 32), *torch.randn(2, 1, 2, 600, 32))
    return seed

if __name__ == "__main__":
    torch.set_num_threads(2)
    work(7)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map_async(work, range(3)).get(600) == [0, 1, 2]
"""


@pytest.mark.long
def test_spawned_children_decode_too(tmp_path):
    file = tmp_path / "spawning.py"
    file.write_text(SPAWN)
    run_python(f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')")
