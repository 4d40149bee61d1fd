"""Which backends run inside a block of code: counted there, and only there."""

import threading
from collections import Counter

import pytest
import torch

from regard import Causal, Part, attend, prepare
from regard.ops.backends import BACKENDS
from regard.ops.explain import kernel_objection
from regard.ops.observed import BACKEND_RUNS, CALLS, backends_run, calls_run, names

Q = torch.randn(1, 2, 3, 8)


def test_calls_are_counted_inside_the_block_alone():
    with backends_run() as ran:
        for backend in ("eager", "eager", "sdpa"):
            attend(Q, Q, Q, mask=Causal(), backend=backend)
    attend(Q, Q, Q, backend="eager")
    assert ran == Counter(eager=2, sdpa=1)
    assert BACKEND_RUNS == []


def test_a_failure_inside_the_block_leaves_no_hook():
    with pytest.raises(RuntimeError, match="inside"), backends_run():
        raise RuntimeError("inside")
    assert BACKEND_RUNS == []


def test_blocks_inside_of_one_another_count_on_their_own():
    with backends_run() as outer:
        attend(Q, Q, Q, backend="eager")
        with backends_run() as inner:
            attend(Q, Q, Q, backend="eager")
        attend(Q, Q, Q, backend="sdpa")
    assert (outer, inner) == (Counter(eager=2, sdpa=1), Counter(eager=1))


def test_a_description_made_before_the_block_is_counted():
    """Nothing of a description or of a memo says whether anybody counts."""
    prepared = prepare(Q, Q, Q)
    with backends_run() as ran:
        prepared.run(Q, [Part(0, 3, (Q, Q))])
        assert prepare(Q, Q, Q).name == prepared.name
    assert ran == Counter({prepared.name: 1})


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
    assert (first.call.given_mask, second.call.num_queries) == (Causal(), 1)


def test_calls_of_other_threads_are_not_passed_on():
    calls = []
    with calls_run(lambda *call: calls.append(call)):
        other = threading.Thread(target=lambda: attend(Q, Q, Q))
        other.start()
        other.join()
    assert not calls


def test_blocks_that_watch_calls_leave_nothing_behind():
    calls = []
    with pytest.raises(RuntimeError, match="inside"), calls_run(calls.append):
        raise RuntimeError("inside")
    with calls_run(lambda *call: calls.append(1)), calls_run(lambda *call: calls.append(2)):
        attend(Q, Q, Q)
    assert calls == [1, 2]
    assert CALLS == []


def test_the_most_frequent_backend_is_named_first():
    assert names(Counter(eager=1, sdpa=5, fused=3)) == "sdpa and fused and eager"
    assert names(Counter()) == ""


def test_the_kernel_runs_here_or_says_why_not(monkeypatch):
    pytest.importorskip("numba")
    assert kernel_objection() is None
    objecting = BACKENDS["fused"]._replace(objection=lambda call: "it is switched off")
    monkeypatch.setitem(BACKENDS, "fused", objecting)
    assert kernel_objection() == "it is switched off"
