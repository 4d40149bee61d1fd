"""Devices of a plan: their sources, their rates, and this machine's."""

import pytest

from regard.ops.devices import DATA_SHEETS
from regard.ops.rates import SPEED, write_speed
from regard.ops.speed import Speed
from regard.plan.devices import (
    DEVICES,
    Device,
    device_of,
    is_measured,
    roofline_seconds,
    this_machine,
)
from regard.plan.shapes import DTYPE_BYTES

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


@pytest.mark.parametrize(
    ("key", "gigabytes", "teraflops"),
    [
        ("epyc-9654", 460.8, 7.3728),
        ("epyc-9755", 614.4, 22.1184),
        ("ryzen-9-7950x", 83.2, 2.304),
        ("xeon-platinum-8480+", 307.2, 7.168),
    ],
)
def test_cpus_by_hand(key, gigabytes, teraflops):
    device = device_of(key)
    assert device.memory_bandwidth == pytest.approx(gigabytes * 1e9)
    assert device.flops["float32"] == pytest.approx(teraflops * 1e12)


def test_names_may_be_written_in_full():
    assert device_of("NVIDIA GeForce RTX 4090") is device_of("rtx-4090")


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"device='h1' is not one of this, b200, .*epyc-9654"):
        device_of("h1")


@pytest.mark.parametrize(
    ("flops", "moved", "expected"),
    [(20, 100, (2.0, "compute")), (5, 100, (1.0, "memory")), (10, 100, (1.0, "memory"))],
)
def test_the_larger_of_two_times(flops, moved, expected):
    assert roofline_seconds(flops, moved, TOY, "float32") == expected


@pytest.fixture
def own_rates(tmp_path, monkeypatch):
    """A folder of rates of this test's own, and no rates in it; the same rates after."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    monkeypatch.delenv("REGARD_SPEED", raising=False)
    before = dict(vars(SPEED))
    yield
    vars(SPEED).clear()
    vars(SPEED).update(before)


def test_this_machine_by_its_stored_rates(own_rates):
    assert not is_measured()
    write_speed(Speed(stream=5e10, products=2e11, products_half=3e11))
    assert is_measured()
    device = this_machine()
    assert device.memory_bandwidth == 5e10
    assert device.flops == {"float32": 2e11, "float16": 3e11, "bfloat16": 3e11}
    assert device.name.startswith("this machine, ")
    assert device_of("this") == device


def test_defaults_are_not_taken_for_measured(own_rates, monkeypatch):
    write_speed(Speed())
    monkeypatch.setenv("REGARD_SPEED", "default")
    assert not is_measured()
    with pytest.raises(ValueError, match="REGARD_SPEED=default forbids measuring"):
        device_of("this")
