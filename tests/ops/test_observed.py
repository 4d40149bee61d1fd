"""Which backends run inside a block of code: counted there, and only there."""

import threading
from collections import Counter

import pytest
import torch

from regard import Causal, attend
from regard.ops.backends import BACKENDS
from regard.ops.observed import backends_run, calls_run, kernel_objection, names
from regard.ops.prepared import Prepared

Q = torch.randn(1, 2, 3, 8)


def test_calls_are_counted_inside_the_block_alone():
    before = dict(BACKENDS)
    with backends_run() as ran:
        for backend in ("eager", "eager", "sdpa"):
            attend(Q, Q, Q, mask=Causal(), backend=backend)
    attend(Q, Q, Q, backend="eager")
    assert ran == Counter(eager=2, sdpa=1)
    assert before == BACKENDS


def test_a_failure_inside_the_block_leaves_the_table_as_it_was():
    before = dict(BACKENDS)
    with pytest.raises(RuntimeError, match="inside"), backends_run():
        raise RuntimeError("inside")
    assert before == BACKENDS


def test_counting_changes_no_output():
    wanted = attend(Q, Q, Q, mask=Causal())
    with backends_run() as ran:
        assert torch.equal(attend(Q, Q, Q, mask=Causal()), wanted)
    assert ran.total() == 1


def test_calls_are_passed_on_after_they_ran():
    calls = []
    wanted = attend(Q, Q, Q, mask=Causal())
    with calls_run(lambda *call: calls.append(call)):
        assert torch.equal(attend(Q, Q, Q, mask=Causal()), wanted)
        attend(Q[:, :, :1], Q, Q)
    attend(Q, Q, Q)
    (first, q, (part,)), (second, *_) = calls
    assert q is Q
    assert (part.kv_start, part.kv_stop, part.streams[0] is Q) == (0, 3, True)
    assert (first.call.asked, second.call.num_queries) == (Causal(), 1)


def test_calls_of_other_threads_are_not_passed_on():
    calls = []
    with calls_run(lambda *call: calls.append(call)):
        other = threading.Thread(target=lambda: attend(Q, Q, Q))
        other.start()
        other.join()
    assert not calls


def test_blocks_that_watch_calls_leave_nothing_behind():
    own, calls = Prepared.run, []
    with pytest.raises(RuntimeError, match="inside"), calls_run(calls.append):
        raise RuntimeError("inside")
    with calls_run(lambda *call: calls.append(1)), calls_run(lambda *call: calls.append(2)):
        attend(Q, Q, Q)
    assert calls == [1, 2] or calls == [2, 1]
    assert Prepared.run is own


def test_the_most_frequent_backend_is_named_first():
    assert names(Counter(eager=1, sdpa=5, fused=3)) == "sdpa and fused and eager"
    assert names(Counter()) == ""


def test_the_kernel_runs_here_or_says_why_not(monkeypatch):
    pytest.importorskip("numba")
    assert kernel_objection() is None
    objecting = BACKENDS["fused"]._replace(objection=lambda call: "it is switched off")
    monkeypatch.setitem(BACKENDS, "fused", objecting)
    assert kernel_objection() == "it is switched off"
