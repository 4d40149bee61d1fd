"""Rates of GPUs: by name, by properties, and in estimates; no GPU is needed for them."""

from types import SimpleNamespace

import pytest
import torch

from interpreters import run_python
from regard import Causal, SlidingWindow, Span, explain, prepare
from regard.ops import devices
from regard.ops.backends import BACKENDS
from regard.ops.devices import (
    DATA_SHEETS,
    UNKNOWN,
    on_device,
    rates_by_properties,
    rates_note,
    rates_of,
    visible_share,
)

COMPILED = """
import torch
from regard import Causal, SlidingWindow, attend
q = torch.zeros(1, 8, 40, 32, device="meta", dtype=torch.bfloat16)
k = torch.zeros(1, 2, 40, 32, device="meta", dtype=torch.bfloat16)
run = lambda q, k: attend(q, k, k, mask=Causal() & SlidingWindow(8))
print(tuple(torch.compile(run, fullgraph=True, backend="eager", dynamic=True)(q, k).shape))
"""
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


def call(queries=4096, keys=4096, dtype=torch.bfloat16, **options):
    q = torch.empty(1, 32, queries, 128, dtype=dtype, device="meta")
    k = torch.empty(1, 8, keys, 128, dtype=dtype, device="meta")
    options.setdefault("span", Span(keys - queries, keys, 0, keys))
    return prepare(q, k, k, **options)


def test_estimates_scale_with_the_device(monkeypatch):
    fast = UNKNOWN._replace(memory=10 * UNKNOWN.memory, half=10 * UNKNOWN.half, single=1e15)
    made = call(mask=Causal())
    slow = {name: BACKENDS[name].estimate(made.call) for name in ("sdpa", "blocked", "eager")}
    monkeypatch.setattr(devices, "rates_of", lambda device: fast)
    for name, seconds in slow.items():
        assert BACKENDS[name].estimate(made.call) < 0.8 * seconds


def test_float32_is_estimated_as_torch_computes_it():
    made = call(dtype=torch.float32).call
    exact = on_device(made, operators=1, kernel=0.5)
    torch.set_float32_matmul_precision("high")
    try:
        assert on_device(made, operators=1, kernel=0.5) < 0.5 * exact
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"mask": Causal()}, "sdpa"),
        ({"queries": 1, "mask": Causal()}, "sdpa"),
        ({"queries": 1, "mask": Causal(), "softcap": 30.0}, "grouped"),
        ({"queries": 1, "mask": Causal(), "sinks": torch.empty(32, device="meta")}, "grouped"),
    ],
)
def test_choices_on_a_device(options, name):
    assert call(**options).name == name


def test_the_share_of_visible_scores():
    assert visible_share(call(mask=Causal()).call) == pytest.approx(0.5, abs=0.05)
    window = call(mask=Causal() & SlidingWindow(512)).call
    assert visible_share(window) == pytest.approx(512 / 4096, abs=0.02)
    assert visible_share(call().call) == 1.0
    assert visible_share(call(queries=1, mask=Causal()).call) == 1.0


def test_explain_says_what_the_estimates_rest_on():
    assert "not yet measured on this device" in explain(call()).splitlines()[-1]
    assert rates_note(torch.device("cpu")) is None


def test_calls_on_a_device_compile_in_one_graph():
    """The estimates are computed while a graph is traced, without a look at the driver. In another
    process, whose annotations are not checked: torch does not trace the checks."""
    done = run_python("-c", COMPILED)
    assert done.stdout.strip() == "(1, 8, 40, 32)", done.stderr[-3000:]
