"""Rates taken quickly: those of a machine, whatever surrounds the call; no trace is left."""

import time
from dataclasses import asdict

import pytest
import torch
from torch.overrides import TorchFunctionMode

import regard.ops.quick_rates as quick_module
from regard.ops.quick_rates import LONG, MOST, Rate, quick_speed, without_products
from regard.ops.speed import DEFAULT

ROW = Rate(lambda: time.sleep(1e-4), 7e5)


@pytest.fixture
def small(monkeypatch):
    """Operations that take a millisecond together: the rates are wrong, but there."""

    def rates(x):
        products = quick_module.products(x, 64)
        return {"call": quick_module.tiny_operators(1), "products": products, "row_float": ROW}

    monkeypatch.setattr(quick_module, "PART", 1 << 12)
    monkeypatch.setattr(quick_module, "_rates", rates)


def test_every_rate_is_that_of_a_machine():
    speed, _ = quick_speed()
    assert speed.objection() is None
    names = quick_module._rates(torch.ones(4 * quick_module.PART)).keys()
    left = asdict(DEFAULT).keys() - names - {"fused", "stream", "tiled"}
    half = {"row_half", "rows_half", "products_half"}
    assert left == (half if quick_module.NO_BFLOAT16 else set())


class Recording(TorchFunctionMode):
    """Counts the operations that it is asked about."""

    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_what_surrounds_it_changes_nothing_and_it_changes_nothing(small):
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    before = torch.get_rng_state()
    try:
        with Recording() as mode, torch.autocast("cpu"), torch.inference_mode():
            calls = mode.calls
            speed, _ = quick_speed()
            assert mode.calls == calls
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert speed.objection() is None
    assert torch.get_rng_state().equal(before)


def test_a_slow_operation_runs_twice_and_others_several_times(small, monkeypatch):
    monkeypatch.setattr(quick_module, "LIMIT", 60.0)
    ran = {"slow": 0, "quick": 0}

    def slow():
        ran["slow"] += 1
        time.sleep(1.2 * LONG)

    def quick():
        ran["quick"] += 1

    times = quick_module._rounds({"slow": Rate(slow, 1.0), "quick": Rate(quick, 1.0)})
    assert ran["slow"] == 2
    assert ran["quick"] == 1 + MOST
    assert [len(times[name]) for name in ran] == [1, MOST]  # the first of several is not counted


def test_a_busy_machine_is_noticed(small, monkeypatch):
    monkeypatch.setattr(
        quick_module, "_rounds", lambda rates: {name: [1e-6, 5e-6, 9e-6] for name in rates}
    )
    found = {"products": Rate(int, 160e3), "row_float": Rate(int, 7e3)}
    monkeypatch.setattr(quick_module, "_rates", lambda x: found)
    speed, steady = quick_speed()
    assert speed.products == pytest.approx(160e9)  # the best of the runs
    assert not steady


def test_what_cannot_be_a_machine_is_not_used(small, monkeypatch):
    monkeypatch.setattr(
        quick_module, "_rates", lambda x: dict.fromkeys(["row_float"], Rate(int, 1e-9))
    )
    assert quick_speed() == (DEFAULT, False)


def test_without_memory_the_defaults_are_used(monkeypatch):
    monkeypatch.setattr(quick_module, "PART", 1 << 50)
    assert quick_speed() == (DEFAULT, False)


def test_the_products_of_narrow_scores_are_taken_off():
    assert without_products(1e9, 1e15) == pytest.approx(1e9, rel=1e-3)
    assert without_products(1e9, 256e9) == pytest.approx(1e9 / 0.75)  # 64 operations: 0.25 ns
    assert without_products(1e9, 1e9) == pytest.approx(2e9)  # half of the time at most
