"""Devices of a plan: their sources, their rates, and this machine's."""

from dataclasses import replace

import pytest
import torch

from own_rates import own_rates
from regard.devices import DATA_SHEETS
from regard.plan.devices import (
    DEVICES,
    Device,
    device_of,
    is_measured,
    roofline_seconds,
    this_machine,
)
from regard.plan.shapes import DTYPE_BYTES
from regard.rates import typical, write_speed

__all__ = ["own_rates"]

TOY = Device("toy", 100.0, {"float32": 10.0}, None, "invented")


@pytest.mark.parametrize("key", DEVICES)
def test_every_device_has_a_source_and_positive_rates(key):
    device = DEVICES[key]
    assert device.source
    assert device.memory_bandwidth > 1e10
    assert device.flops
    assert set(device.flops) <= set(DTYPE_BYTES)
    assert all(rate > 1e12 for rate in device.flops.values())
    assert device.memory_bytes is None or device.memory_bytes > 1e10


def test_gpus_have_the_rates_of_their_data_sheets():
    for sheet in DATA_SHEETS:
        device = device_of(sheet.name)
        assert device.memory_bandwidth == sheet.memory
        assert device.flops["float32"] == sheet.single
        assert device.flops["float16"] == sheet.half


def test_devices_without_bfloat16_state_no_rate_of_it():
    assert "bfloat16" not in device_of("v100").flops
    assert "bfloat16" not in device_of("t4").flops
    with pytest.raises(
        ValueError, match="no rate of Tesla T4 in bfloat16 is known, but in float16"
    ):
        roofline_seconds(1, 1, device_of("t4"), "bfloat16")


def test_names_may_be_written_in_full():
    assert device_of("NVIDIA GeForce RTX 4090") is device_of("rtx-4090")


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"device='h1' is not one of this, b200, .*mi300x"):
        device_of("h1")


@pytest.mark.parametrize(
    ("flops", "moved", "expected"),
    [(20, 100, (2.0, "compute")), (5, 100, (1.0, "memory")), (10, 100, (1.0, "memory"))],
)
def test_the_larger_of_two_times(flops, moved, expected):
    assert roofline_seconds(flops, moved, TOY, "float32") == expected


@pytest.mark.usefixtures("own_rates")
def test_this_machine_by_its_stored_rates():
    assert not is_measured()
    usual = typical(torch.get_num_threads())
    stored = replace(usual, stream=1.5 * usual.stream)
    write_speed(stored)
    assert is_measured()
    device = this_machine()
    assert device.memory_bandwidth == stored.stream
    half = stored.products_half
    assert device.flops == {"float32": stored.products, "float16": half, "bfloat16": half}
    assert device.name.startswith("this machine, ")
    assert device.source == "measured by regard"
    assert device_of("this") == device


def test_this_machine_by_the_usual_rates_of_its_processor(own_rates, monkeypatch):
    """Nothing is measured; rates that cannot be this machine's do not count."""
    monkeypatch.setattr("time.perf_counter", lambda: pytest.fail("a clock was read"))
    usual = typical(torch.get_num_threads())
    device = device_of("this")
    assert device.memory_bandwidth == usual.stream
    assert "regard tune" in device.source
    write_speed(usual).write_text("{}")
    with pytest.warns(UserWarning, match="is ignored"):
        assert not is_measured()


def test_defaults_are_not_taken_for_measured(own_rates, monkeypatch):
    write_speed(typical(torch.get_num_threads()))
    monkeypatch.setenv("REGARD_SPEED", "default")
    assert not is_measured()
