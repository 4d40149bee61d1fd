"""Ranks that die, sleep or call for something else: the others raise an error, and do not hang."""

import os
import select
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from layers import inputs, make
from ranks import AFTER_AN_ERROR, Apart, Pool, on_ranks, restart_clock
from regard import PagedCache, PagePool
from regard.cache.paging.tables import Tables
from regard.distributed import ShardedCache, context_parallel, tensor_parallel
from regard.distributed.ranks import RankError, Ranks
from session import LONG

TIMEOUT = 30.0  # seconds, of process groups that need not wait so long
SHORT = 3.0  # seconds, of those in which the time runs out, once all ranks have started
SLACK = 6.0  # seconds, for a busy machine


def _ring(ranks, step):
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    arrived = torch.empty(3)
    ranks.exchange({after: torch.zeros(3)}, {before: arrived}, step).wait()


def _start(mesh):
    ranks = Ranks(mesh)
    _ring(ranks, "the first step")
    return ranks


def _begin(ranks, timeout=TIMEOUT):
    """What follows is measured, and has that time-out. All ranks have come as far."""
    ranks.all_reduce(torch.zeros(1), "start")
    Ranks.timeout = timedelta(seconds=timeout)
    restart_clock()


def dies_before_a_gather(mesh):
    ranks = _start(mesh)
    if ranks.rank == 1:
        os._exit(1)
    ranks.all_gather(torch.zeros(4), "gather")


def dies_before_a_sum(mesh):
    ranks = _start(mesh)
    if ranks.rank == 2:
        os._exit(1)
    ranks.all_reduce(torch.zeros(4), "sum")


def dies_in_a_ring(mesh):
    """Ranks 0 and 2 exchange with rank 1; rank 3 waits for them."""
    ranks = _start(mesh)
    if ranks.rank == 1:
        os._exit(1)
    _ring(ranks, "ring")
    _ring(ranks, "ring")


def sleeps_in_a_ring(mesh):
    ranks = _start(mesh)
    _begin(ranks, SHORT)
    if ranks.rank == 1:
        time.sleep(60)
    _ring(ranks, "ring")
    _ring(ranks, "ring")


def dies_as_host(mesh):
    ranks = _start(mesh)
    if ranks.rank == 0:
        os._exit(1)
    ranks.all_gather(torch.zeros(4), "gather")


def receives_another_size(mesh):
    ranks = _start(mesh)
    _begin(ranks, SHORT)
    ranks.all_gather(torch.zeros(4 + ranks.rank), "gather")


def receives_another_step(mesh):
    """Rank 0 makes two calls in another order than the others."""
    ranks = _start(mesh)
    _begin(ranks, SHORT)
    for step in ("keys", "values")[:: 1 if ranks.rank else -1]:
        ranks.all_gather(torch.zeros(4), step)


def dies_as_host_in_a_ring(mesh):
    """Rank 2 waits for ranks 1 and 3 alone, and the store is gone."""
    ranks = _start(mesh)
    if ranks.rank == 0:
        os._exit(1)
    _ring(ranks, "ring")
    _ring(ranks, "ring")


def dies_in_a_part_of_the_world(mesh):
    """Ranks are named by their numbers in the world."""
    _start(mesh)
    ranks = Ranks(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"])
    ranks.all_gather(torch.zeros(1), "gather")
    assert ranks.timeout == timedelta(seconds=TIMEOUT)  # that of the world
    if mesh.get_local_rank() == 3:
        os._exit(1)
    ranks.all_gather(torch.zeros(1), "gather")


def leaves_out_a_call(mesh):
    """Rank 2 makes one call fewer, and ends in good health."""
    ranks = _start(mesh)
    if ranks.rank != 2:
        ranks.all_reduce(torch.zeros(4), "sum of the gradients")
    return "done"


def fails_a_second_time(mesh):
    ranks = _start(mesh)
    if ranks.rank == 1:
        os._exit(1)
    with pytest.raises(RankError, match="the first gather: rank"):
        ranks.all_gather(torch.zeros(4), "the first gather")
    ranks.all_gather(torch.zeros(4), "gather")


@contextmanager
def _ends(ranks, method, at, words=""):
    """Let this rank end as it sends message number `at` of those whose step has the words."""
    plain, seen = getattr(Ranks, method), []

    def sends(self, *args):
        if words in args[-1]:
            seen.append(args[-1])
            if len(seen) == at:
                os._exit(1)
        return plain(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(Ranks, method, sends)
        yield


def _context_parallel(mesh, timeout=TIMEOUT):
    ranks, layer = _start(mesh), make("GQA").train()
    plan = context_parallel(layer, mesh)
    x = plan.shard(inputs(2, 17)).requires_grad_()
    layer(x).sum().backward()
    _begin(ranks, timeout)
    return ranks, layer, x


def dies_in_a_forward_pass(mesh):
    """In the second of the steps of a ring."""
    ranks, layer, x = _context_parallel(mesh)
    with _ends(ranks, "exchange", 2, "keys and values"):
        layer(x)


def dies_in_a_backward_pass(mesh):
    ranks, layer, x = _context_parallel(mesh)
    with _ends(ranks, "exchange", 1, "gradients"):
        layer(x).sum().backward()


def leaves_out_a_backward_pass(mesh):
    ranks, layer, x = _context_parallel(mesh)
    out = layer(x)
    if ranks.rank != 2:
        out.sum().backward()
    return "done"


def calls_twice(mesh):
    """Rank 0 makes a second call, the others go on to the backward pass."""
    ranks, layer, x = _context_parallel(mesh, SHORT)
    out = layer(x)
    if ranks.rank == 0:
        out = layer(x)
    out.sum().backward()


def dies_in_a_tensor_parallel_layer(mesh):
    ranks, layer = _start(mesh), tensor_parallel(make("everything").train(), mesh)
    layer(inputs(2, 5)).sum().backward()
    _begin(ranks)
    with _ends(ranks, "all_reduce", 1):
        layer(inputs(2, 5))


def dies_in_a_decoding_step(mesh):
    ranks, layer, cache = _start(mesh), make("MLA"), ShardedCache(mesh, 2)
    x = inputs(2, 9)
    with torch.no_grad(), _ends(ranks, "all_gather", 3):
        layer(x[:, :5], cache=cache)
        _begin(ranks)
        for token in range(5, 9):
            length = cache.length
            try:
                layer(x[:, token : token + 1], cache=cache)
            except RankError:
                assert cache.length == length, "the cache is as it was"
                raise


def _dies_in_a_change(mesh, change):
    """Rank 1 ends as its cache changes; the cache of the other is as before the call after it."""
    ranks, layer = _start(mesh), tensor_parallel(make("GQA").eval(), mesh)
    cache, x = PagedCache(PagePool(64, 2, format="K4V4")), inputs(2, 9)
    with torch.no_grad():
        layer(x[:, :8], cache=cache)
        _begin(ranks)
        if ranks.rank == 1:
            Tables.replace = lambda *_: os._exit(1)
        change(cache)
        before = cache.length, [page for table in cache.rows for page in table.pages]
        try:
            layer(x[:, 8:], cache=cache)
        except RankError:
            assert before == (cache.length, [p for table in cache.rows for p in table.pages])
            change(cache)  # and can be used
            raise


def dies_in_a_truncation(mesh):
    _dies_in_a_change(mesh, lambda cache: cache.truncate(torch.tensor([5, 4])))


def dies_in_a_reordering(mesh):
    _dies_in_a_change(mesh, lambda cache: cache.reorder(torch.tensor([1, 0])))


CASES = {
    # function: ranks, the one that ends, store, whether the time-out runs out first
    dies_before_a_gather: (3, (1,), "file", False),
    dies_before_a_sum: (3, (2,), "tcp", False),
    dies_in_a_ring: (4, (1,), "tcp", False),
    sleeps_in_a_ring: (4, (1,), "file", True),
    dies_as_host: (3, (0,), "tcp", False),
    dies_as_host_in_a_ring: (4, (0,), "tcp", False),
    leaves_out_a_call: (3, (2,), "tcp", False),
    fails_a_second_time: (3, (1,), "file", False),
}
PLANS = {
    dies_in_a_forward_pass: (3, (1,), "tcp", False),
    dies_in_a_backward_pass: (3, (1,), "file", False),
    leaves_out_a_backward_pass: (3, (2,), "file", False),
    dies_in_a_tensor_parallel_layer: (2, (1,), "file", False),
    dies_in_a_truncation: (2, (1,), "file", False),
    dies_in_a_reordering: (2, (1,), "file", False),
    dies_in_a_decoding_step: (3, (1,), "file", False),
}
STEPS = {  # in the error
    dies_in_a_forward_pass: "exchange of keys and values",
    dies_in_a_backward_pass: "exchange of",  # a rank may be ahead of the other by a step
    leaves_out_a_backward_pass: "exchange of",
    dies_in_a_tensor_parallel_layer: "tensor parallel: sum of the outputs",
    dies_in_a_truncation: "tensor parallel: sum of the outputs",
    dies_in_a_reordering: "tensor parallel: sum of the outputs",
    dies_in_a_decoding_step: "sharded decode",
}
DISAGREEING = [receives_another_size, receives_another_step]


NORMAL = [*CASES, *PLANS] if LONG else [
    dies_before_a_gather, dies_as_host_in_a_ring, dies_in_a_tensor_parallel_layer,
    dies_in_a_decoding_step,
]  # fmt: skip


def _begun(case):
    number, _, store, _ = {**CASES, **PLANS}[case]
    return Apart(number, case, timeout=TIMEOUT, store=store)


@pytest.fixture(scope="module")
def started():
    """The ranks of all cases, side by side: most of their time they wait."""
    cases = {case: _begun(case) for case in NORMAL if case in CASES}
    cases[dies_in_a_part_of_the_world] = Apart(4, dies_in_a_part_of_the_world, timeout=TIMEOUT)
    return cases | {case: Apart(3, case, timeout=TIMEOUT) for case in DISAGREEING}


@pytest.fixture(scope="module")
def started_plans(started):
    for apart in started.values():
        apart.settled()
    cases = {case: _begun(case) for case in NORMAL if case in PLANS}
    return cases | {calls_twice: Apart(3, calls_twice, timeout=TIMEOUT)}


def _assert_named(outcomes, silent, seconds):
    """Every other rank raises; one of them at least waited for the rank that ended."""
    errors = []
    for rank, (error, after) in enumerate(outcomes):
        if rank not in silent:
            assert isinstance(error, RankError), getattr(error, "text", error)
            assert error.ranks and rank not in error.ranks
            assert str(error).startswith(f"{error.step}: rank")
            assert f" did not answer rank {rank}: " in str(error)
            assert after < seconds + SLACK
            errors.append(error)
    assert any({*silent} <= {*error.ranks} for error in errors)


@pytest.mark.parametrize(
    "case", [case for case in NORMAL if case in CASES], ids=lambda case: case.__name__
)
def test_a_rank_that_does_not_answer_is_named(started, case):
    _, silent, _, runs_out = CASES[case]
    _assert_named(started[case].outcomes(silent), silent, SHORT * runs_out)


@pytest.mark.parametrize("case", DISAGREEING, ids=lambda case: case.__name__)
def test_ranks_that_send_something_else_are_told_so(started, case):
    for error, seconds in started[case].outcomes():
        assert isinstance(error, RankError), getattr(error, "text", error)
        assert "every rank makes the same calls in the same order" in str(error)
        assert seconds < SHORT + SLACK


def test_a_rank_of_a_mesh_is_named_by_its_number_in_the_world(started):
    outcomes = started[dies_in_a_part_of_the_world].outcomes()
    assert [error for error, _ in outcomes[:2]] == [None, None]
    assert outcomes[2][0].ranks == (3,)
    assert "gather: rank 3 did not answer rank 2" in str(outcomes[2][0])


@pytest.mark.parametrize(
    "case", [case for case in NORMAL if case in PLANS], ids=lambda case: case.__name__
)
def test_a_rank_that_dies_in_a_layer_is_named(started_plans, case):
    _, silent, _, runs_out = PLANS[case]
    outcomes = started_plans[case].outcomes(silent)
    _assert_named(outcomes, silent, SHORT * runs_out)
    for error, _ in outcomes:
        assert error is None or error.step.startswith(STEPS[case])


def test_a_rank_that_calls_a_layer_twice(started_plans):
    (first, _), *others = started_plans[calls_twice].outcomes()
    assert first.step.startswith("agreement")
    for error, _ in others:
        assert error.step.startswith("exchange of keys and values")


def _ends_in_the_pool(mesh):
    if mesh.get_local_rank() == 1:
        os._exit(3)
    Ranks(mesh).all_gather(torch.zeros(1), "gather")


def _raises_in_the_pool(mesh):
    assert mesh.get_local_rank() != 1, "one rank raises"
    Ranks(mesh).all_gather(torch.zeros(1), "gather")


def _number(mesh):
    return mesh.get_local_rank()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_ends_in_the_pool, "rank 1 of 3: ended, with exit code 3"),
        (_raises_in_the_pool, "one rank"),
    ],
)
def test_ranks_of_tests_begin_anew_after_an_error(function, message):
    pool = Pool()
    start = time.monotonic()
    with pytest.raises(AssertionError, match=message):
        pool.run(3, None, function, (), {})
    assert time.monotonic() - start < AFTER_AN_ERROR + SLACK
    pool.end()
    assert not any(process.is_alive() for process in pool.processes)
    assert on_ranks(3, _number) == [0, 1, 2]


def _process(_):
    return os.getpid()


@pytest.mark.long
def test_ranks_of_tests_end_with_the_process_that_forked_them():
    program = """
import os, sys
from ranks import on_ranks
from test_failures import _process
print(*on_ranks(4, _process), flush=True)
os._exit(0)
"""
    folders = [Path(__file__).parent, *sys.path]
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=True,
    )
    numbers = [int(each) for each in found.stdout.split()]
    assert len(numbers) == 4
    until = time.monotonic() + SLACK
    while (left := [n for n in numbers if _runs(n)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []


def _runs(number):
    status = Path(f"/proc/{number}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_ranks_hold_no_files_of_the_process_that_forked_them():
    """Or a process that reads a pipe of it to its end would wait as long as they run."""
    reader, writer = os.pipe()
    pool = Pool()
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], 5.0)
    pool.end()
    assert ready
    assert os.read(reader, 1) == b""
    os.close(reader)
