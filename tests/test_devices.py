"""The rates of GPUs: data sheets by name, and estimates by clocks and units."""

from types import SimpleNamespace

import pytest
import torch

from regard.devices import DATA_SHEETS, UNKNOWN, rates_by_properties, rates_of

NAMES = {  # as torch.cuda.get_device_name() gives them: bytes a second of memory
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H100 PCIe": 2.0e12,
    "NVIDIA H100 NVL": 3.9e12,
    "NVIDIA A100-SXM4-40GB": 1.56e12,
    "NVIDIA A100-SXM4-80GB": 2.04e12,
    "NVIDIA A100 80GB PCIe": 1.94e12,
    "NVIDIA L40S": 864e9,
    "NVIDIA L4": 300e9,
    "NVIDIA B200": 8e12,
    "NVIDIA GeForce RTX 4090": 1.01e12,
    "NVIDIA GeForce RTX 5090": 1.79e12,
    "Tesla T4": 320e9,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_device_has_the_rates_of_its_data_sheet(name):
    found = rates_by_properties(SimpleNamespace(name=name))
    assert found.memory == NAMES[name]
    assert found.source != "none"


def test_the_table_is_in_order_and_plausible():
    for number, sheet in enumerate(DATA_SHEETS):
        shadowed = [
            other.name for other in DATA_SHEETS[:number] if sheet.name.startswith(other.name)
        ]
        assert not shadowed, f"{sheet.name} is never reached"
        assert sheet.single <= sheet.tf32 <= sheet.half
        assert 50 <= sheet.half / sheet.memory <= 500  # operations a byte


def test_an_unknown_name_has_the_rates_of_its_clocks():
    """An H100 SXM by its numbers: 132 multiprocessors at 1.83 GHz, 5120 bits at 2.619 GHz."""
    properties = {
        "name": "NVIDIA X900", "multi_processor_count": 132, "clock_rate": 1_830_000,
        "memory_clock_rate": 2_619_000, "memory_bus_width": 5120, "major": 9,
    }  # fmt: skip
    found = rates_by_properties(SimpleNamespace(**properties))
    assert found.memory == pytest.approx(3.35e12, rel=0.01)
    assert found.half == pytest.approx(989e12, rel=0.01)
    assert found.single == pytest.approx(62e12, rel=0.1)
    for missing in properties.keys() - {"name"}:
        left = {name: value for name, value in properties.items() if name != missing}
        assert rates_by_properties(SimpleNamespace(**left)) == UNKNOWN._replace(name="NVIDIA X900")


def test_rates_are_looked_up_once_and_no_kernel_is_waited_for(monkeypatch):
    asked = []

    def properties(device):
        asked.append(device)
        return SimpleNamespace(name="NVIDIA H200")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *given: pytest.fail("waits"))
    rates_of.cache_clear()
    try:
        assert {rates_of(torch.device("cuda", 3)).memory for _ in range(3)} == {4.8e12}
    finally:
        rates_of.cache_clear()
    assert asked == [torch.device("cuda", 3)]
