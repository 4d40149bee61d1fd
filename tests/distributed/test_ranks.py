"""Messages between ranks: what arrives, what is counted, and what is refused."""

from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
import torch

from ranks import PATIENCE, on_ranks
from regard.distributed.ranks import Ranks, counted, sum_bytes


def _sum_and_gather(mesh):
    ranks = Ranks(mesh)
    with counted() as sent:
        total = ranks.all_reduce(torch.full((6,), float(ranks.rank)), "sum")
        pieces = ranks.all_gather(torch.tensor([ranks.rank]), "gather")
    return total, torch.cat(pieces), sent.steps


@pytest.mark.parametrize("number", [2, 3, 4])
def test_sums_and_gathers(number):
    for total, pieces, steps in on_ranks(number, _sum_and_gather):
        assert total.tolist() == [sum(range(number))] * 6
        assert pieces.tolist() == list(range(number))
        assert steps == {"sum": sum_bytes(24, number), "gather": (number - 1) * 8}


def _to_the_next(mesh):
    ranks = Ranks(mesh)
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    arrived = torch.empty(3)
    with counted() as sent:
        ranks.exchange(
            {after: torch.full((3,), ranks.rank + 0.5)}, {before: arrived}, "ring"
        ).wait()
    return arrived, sent.bytes


def test_an_exchange():
    for rank, (arrived, sent) in enumerate(on_ranks(3, _to_the_next)):
        assert arrived.tolist() == [(rank - 1) % 3 + 0.5] * 3
        assert sent == 12


KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]


def _of_every_dtype(mesh):
    ranks = Ranks(mesh)
    return [ranks.all_gather(torch.arange(3).eq(ranks.rank).to(kind), "gather") for kind in KINDS]


def test_tensors_of_every_dtype():
    for every in on_ranks(3, _of_every_dtype):
        for kind, pieces in zip(KINDS, every, strict=True):
            assert torch.equal(torch.stack(pieces), torch.eye(3).to(kind))


def _without_elements(mesh):
    ranks = Ranks(mesh)
    with counted() as sent:
        ranks.exchange({}, {}, "nothing").wait()
        other = 1 - ranks.rank
        ranks.exchange({other: torch.empty(0, 3)}, {other: torch.empty(0, 3)}, "nothing").wait()
        pieces = ranks.all_gather(torch.empty(2, 0), "nothing")
        total = ranks.all_reduce(torch.empty(0), "nothing")
    return [x.shape for x in pieces], total.shape, sent.bytes


def test_tensors_without_elements():
    assert on_ranks(2, _without_elements) == [([(2, 0), (2, 0)], (0,), 0)] * 2


def _strided(mesh):
    ranks = Ranks(mesh)
    other, arrived = 1 - ranks.rank, torch.empty(2, 3)
    ranks.exchange({other: torch.arange(6.0).view(3, 2).T}, {other: arrived}, "it").wait()
    with pytest.raises(AssertionError, match="contiguous"):
        ranks.exchange({}, {other: torch.empty(3, 2).T}, "it")
    with pytest.raises(AssertionError, match="sends to itself"):
        ranks.exchange({ranks.rank: torch.empty(2)}, {}, "it")
    with pytest.raises(AssertionError, match="a tensor on meta, ranks on cpu"):
        ranks.exchange({other: torch.empty(2, device="meta")}, {}, "it")
    return arrived


def test_what_is_sent_may_be_strided_and_what_is_received_may_not():
    for arrived in on_ranks(2, _strided):
        assert torch.equal(arrived, torch.arange(6.0).view(3, 2).T)


def _sums(mesh):
    ranks = Ranks(mesh)
    x = torch.tensor([1.0, 2.0**-9, -1.0][ranks.rank], dtype=torch.bfloat16)
    large = torch.tensor(2**53 + ranks.rank)
    total = ranks.all_reduce(x, "sum"), ranks.all_reduce(large, "sum")
    assert x == [1.0, 2.0**-9, -1.0][ranks.rank]
    return total


def test_sums_in_half_precision_are_in_float32_and_those_of_integers_exact():
    for half, large in on_ranks(3, _sums):
        assert half.dtype == torch.bfloat16
        assert half == 2.0**-9
        assert large == 3 * 2**53 + 3


def _messages_and_count(mesh):
    """The bytes given to torch.distributed, and those counted."""
    ranks, given = Ranks(mesh), []
    with pytest.MonkeyPatch.context() as patch, counted() as sent:
        isend = torch.distributed.isend
        patch.setattr(
            torch.distributed, "isend", lambda x, **at: (given.append(x.nbytes), isend(x, **at))[1]
        )
        ranks.all_gather(torch.zeros(5, dtype=torch.bfloat16), "gather")
        other = (ranks.rank + 1) % 3
        ranks.exchange(
            {other: torch.zeros(7)}, {(ranks.rank - 1) % 3: torch.zeros(7)}, "ring"
        ).wait()
    return sum(given), sent.bytes


def test_the_count_is_that_of_the_messages():
    assert on_ranks(3, _messages_and_count) == [(2 * 10 + 28, 2 * 10 + 28)] * 3


LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")


def _large(mesh, call):
    """Bytes counted, and bytes over the loopback interface meanwhile."""
    ranks = Ranks(mesh)
    x = torch.zeros(2**21)
    ranks.all_gather(torch.zeros(1), "start")
    before = int(LOOPBACK.read_text())
    ranks.all_gather(torch.zeros(1), "start")
    with counted() as sent:
        getattr(ranks, call)(x, "large")
    ranks.all_gather(torch.zeros(1), "end")
    return sent.bytes, int(LOOPBACK.read_text()) - before


@pytest.mark.skipif(not LOOPBACK.exists(), reason="no counter of the loopback interface")
@pytest.mark.parametrize("call", ["all_gather", "all_reduce"])
def test_the_count_is_that_of_the_network_interface(call):
    sizes = []
    for _ in range(5):  # other traffic only adds: the least of several is closest
        counts, seen = zip(*on_ranks(3, _large, call), strict=True)
        sizes.append(max(seen) / sum(counts))
    assert 1 <= min(sizes) < 1.1  # headers of TCP and IP take a few per cent


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return x

    @staticmethod
    def backward(ctx, grad):
        return ctx.ranks.all_reduce(grad, "gradient"), None


def _in_another_thread(mesh):
    """As autograd runs the backward pass on a GPU."""
    ranks = Ranks(mesh)
    with counted() as sent:
        x = torch.zeros(3, requires_grad=True)
        thread = Thread(target=_Summed.apply(x, ranks).sum().backward)
        thread.start()
        thread.join()
    return sent.steps, x.grad


def test_what_other_threads_send_is_counted():
    for steps, grad in on_ranks(2, _in_another_thread):
        assert steps == {"gradient": 12}
        assert grad.tolist() == [2.0] * 3


def _no_mesh(_):
    with pytest.raises(TypeError, match="DeviceMesh"):
        Ranks([0, 1])


def test_what_is_no_mesh_is_refused():
    on_ranks(2, _no_mesh)


def _several_dimensions(mesh):
    with pytest.raises(ValueError, match=r"one dimension, got 2 of sizes \(2, 2\)"):
        Ranks(mesh)
    assert Ranks(mesh["b"]).size == 2


def test_a_mesh_of_two_dimensions_is_refused():
    on_ranks(4, _several_dimensions, mesh=(2, 2))


def _timeouts(mesh):
    ranks, group = Ranks(mesh["b"]), mesh["b"].get_group()
    before = ranks.timeout
    group.set_timeout(timedelta(seconds=7))
    after = ranks.timeout
    group.set_timeout(before)
    other = 1 - ranks.rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "timeout", timedelta(seconds=20))
        ranks.exchange({other: torch.zeros(2)}, {other: torch.zeros(2)}, "it").wait()
        ranks.all_reduce(torch.zeros(2), "it")
    return before, after


def test_the_timeout_is_the_shorter_one_of_the_mesh_and_the_world():
    seconds = [timedelta(seconds=each) for each in (PATIENCE / 2, 7)]
    assert on_ranks(4, _timeouts, mesh=(2, 2)) == [tuple(seconds)] * 4
