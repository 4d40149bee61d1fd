"""What a GPU does in a second, by its data sheet or by its clocks."""

import functools
from typing import Any, NamedTuple

import torch


class DeviceRates(NamedTuple):
    """The rates of a device: bytes and floating-point operations a second.

    Attributes:
        name: the start of the device's name, as torch gives it.
        memory: bytes read from or written to its memory.
        half: floating-point operations of matrix products in float16 and bfloat16, with sums in
            float32, of dense matrices.
        tf32: the same for float32 inputs rounded to TF32; for devices without TF32, as `single`.
        single: floating-point operations in float32.
        source: the document that states them.
        gigabytes: of its memory, in 10**9 bytes; of a name that is sold with several sizes the
            smallest; None if it is not known.
    """

    name: str
    memory: float
    half: float
    tf32: float
    single: float
    source: str
    gigabytes: int | None = None


# Longer names before those that they begin with. Figures "with sparsity" are halved.
DATA_SHEETS = (
    DeviceRates("NVIDIA B200", 8e12, 2250e12, 1125e12, 75e12, "NVIDIA HGX B200 data sheet", 180),
    DeviceRates("NVIDIA H200 NVL", 4.8e12, 836e12, 418e12, 60e12, "NVIDIA H200 data sheet", 141),
    DeviceRates("NVIDIA H200", 4.8e12, 989e12, 494e12, 67e12, "NVIDIA H200 data sheet", 141),
    DeviceRates("NVIDIA H100 PCIe", 2.0e12, 756e12, 378e12, 51e12, "NVIDIA H100 data sheet", 80),
    DeviceRates("NVIDIA H100 NVL", 3.9e12, 836e12, 418e12, 60e12, "NVIDIA H100 data sheet", 94),
    DeviceRates("NVIDIA H100", 3.35e12, 989e12, 494e12, 67e12, "NVIDIA H100 data sheet", 80),
    DeviceRates(
        "NVIDIA A100-SXM4-80GB", 2.04e12, 312e12, 156e12, 19.5e12, "A100 80GB data sheet", 80
    ),
    DeviceRates(
        "NVIDIA A100 80GB PCIe", 1.94e12, 312e12, 156e12, 19.5e12, "A100 80GB data sheet", 80
    ),
    DeviceRates("NVIDIA A100", 1.56e12, 312e12, 156e12, 19.5e12, "NVIDIA A100 data sheet", 40),
    DeviceRates("NVIDIA L40S", 864e9, 362e12, 183e12, 91.6e12, "NVIDIA L40S data sheet", 48),
    DeviceRates("NVIDIA L40", 864e9, 181e12, 90.5e12, 90.5e12, "NVIDIA L40 data sheet", 48),
    DeviceRates("NVIDIA L4", 300e9, 121e12, 60e12, 30.3e12, "NVIDIA L4 data sheet", 24),
    DeviceRates("NVIDIA A10", 600e9, 125e12, 62.5e12, 31.2e12, "NVIDIA A10 data sheet", 24),
    DeviceRates(
        "NVIDIA GeForce RTX 5090", 1.79e12, 209e12, 105e12, 105e12, "Blackwell whitepaper", 32
    ),
    DeviceRates("NVIDIA GeForce RTX 4090", 1.01e12, 165e12, 82.6e12, 82.6e12, "Ada whitepaper", 24),
    DeviceRates("NVIDIA GeForce RTX 3090", 936e9, 71e12, 35.6e12, 35.6e12, "GA102 whitepaper", 24),
    DeviceRates("Tesla V100", 900e9, 125e12, 15.7e12, 15.7e12, "NVIDIA V100 data sheet", 16),
    DeviceRates("Tesla T4", 320e9, 65e12, 8.1e12, 8.1e12, "NVIDIA T4 data sheet", 16),
)
UNKNOWN = DeviceRates("a device of unknown rates", 1e12, 200e12, 100e12, 25e12, "none")


# Floating-point operations of one multiprocessor in a cycle, by the major compute capability: dense
# float16 products with float32 sums, and float32 (CUDA C++ Programming Guide, whitepapers).
_CYCLE = {7: (1024, 128), 8: (1024, 256), 9: (4096, 256), 10: (8192, 256), 12: (1024, 256)}


@functools.cache
def rates_of(device: torch.device) -> DeviceRates:
    """The rates of a device that is not a CPU. Asks its driver, once, and waits for no kernel."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return UNKNOWN
    return rates_by_properties(torch.cuda.get_device_properties(device))


def rates_by_properties(properties: Any) -> DeviceRates:
    """The data sheet of a name; of an unknown name, estimates by clocks and numbers of units."""
    for sheet in DATA_SHEETS:
        if properties.name.startswith(sheet.name):
            return sheet
    unknown = UNKNOWN._replace(name=properties.name or UNKNOWN.name)
    try:  # a driver or a version of torch may not know all of them
        rate = properties.multi_processor_count * 1e3 * properties.clock_rate  # of kHz
        transfers = 2e3 * properties.memory_clock_rate  # of kHz; two in a cycle
        memory = transfers * properties.memory_bus_width / 8
        half, single = _CYCLE.get(properties.major, (0, 0))
    except AttributeError:
        return unknown
    if not all((memory, rate, half)):
        return unknown
    rates = memory, rate * half, rate * half / 2, rate * single
    return DeviceRates(properties.name, *rates, "its clocks and units")
