"""Timing with a clock of the test: variants interleave, and a store cuts cold keys."""

from types import SimpleNamespace

import torch

import regard.bench.timing as timing
import regard.turns as turns
from regard.bench.timing import Store, interleave, product_rate, read_bandwidth


class Clock:
    """Time passes when someone works, and only then."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        clock = SimpleNamespace(perf_counter=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(timing, "time", clock)
        monkeypatch.setattr(turns, "time", clock)

    def sleep(self, seconds):
        self.now += seconds
        if seconds:
            self.calls.append("-")

    def worker(self, name, *seconds):
        """Takes these times in turn, then the last for ever."""
        left = list(seconds)

        def work():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return work


def test_variants_interleave_forwards_and_backwards(monkeypatch):
    clock = Clock(monkeypatch)
    variants = {name: clock.worker(name, 1.0) for name in "abc"}
    times = interleave(variants, rounds=2, sample=0.0)
    assert "".join(clock.calls) == "aabbcc" + "abc" + "cba"  # the first call is not asked
    assert times == {name: [1.0, 1.0] for name in "abc"}


def test_a_rest_before_each_sample_is_not_timed(monkeypatch):
    clock = Clock(monkeypatch)
    variants = {name: clock.worker(name, 1.0) for name in "ab"}
    times = interleave(variants, rounds=2, sample=0.0, rest=0.5)
    assert "".join(clock.calls) == "aabb" + "-a-b" + "-b-a"
    assert times == {name: [1.0, 1.0] for name in "ab"}


def test_quick_variants_repeat_until_the_sample_is_full(monkeypatch):
    clock = Clock(monkeypatch)
    variants = {"slow": clock.worker("s", 0.125), "quick": clock.worker("q", 0.0, 0.0078125)}
    times = interleave(variants, rounds=1, sample=0.0625)
    assert "".join(clock.calls) == "ss" + "qq" + "s" + "q" * 8
    assert times == {"slow": [0.125], "quick": [0.0078125]}


def test_no_round_begins_after_the_limit_once_there_are_six(monkeypatch):
    clock = Clock(monkeypatch)
    assert len(interleave({"a": clock.worker("a", 1.0)}, rounds=9, sample=0.0, limit=0.0)["a"]) == 6
    assert len(interleave({"a": clock.worker("a", 1.0)}, rounds=9, sample=0.0, limit=6.5)["a"]) == 7
    assert len(interleave({"a": clock.worker("a", 1.0)}, rounds=9, sample=0.0)["a"]) == 9


def test_a_store_cuts_one_tensor_behind_the_other():
    store = Store(torch.bfloat16, total=1 << 10)
    first, second = store(3, 5), store(2, 64)
    assert first.dtype == torch.bfloat16
    assert second.data_ptr() - first.data_ptr() == 64 * 2
    larger = store(store.numbers.numel() + 1)
    assert larger.isfinite().all()
    left = store.numbers.numel() - store.at
    assert store(left + 1).data_ptr() == store.numbers.data_ptr()  # from the start again


def test_limits_of_a_machine_are_positive():
    assert read_bandwidth(1) > 0
    assert product_rate(torch.bfloat16, 16) > 0
