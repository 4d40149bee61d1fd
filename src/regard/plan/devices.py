"""Devices whose least times a plan states: by their data sheets, and this machine by its rates."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from regard.devices import DATA_SHEETS, DeviceRates
from regard.rates import read_speed, typical

GIGABYTE = 10**9  # bytes; manufacturers state sizes of memory in it
HALF = ("float16", "bfloat16")
WITHOUT_BFLOAT16 = ("Tesla V100", "Tesla T4")  # their matrix units have no bfloat16
THIS = "this"


@dataclass(frozen=True)
class Device:
    """What a device can do at most, or was measured to do.

    Args:
        name: in full.
        memory_bandwidth: bytes a second.
        flops: operations a second of dense matrix products, by dtype; of a dtype that is not
            there no time is stated.
        memory_bytes: of its memory; None if that is not fixed by its name.
        source: the document that states it, or how it was measured.
    """

    name: str
    memory_bandwidth: float
    flops: Mapping[str, float]
    memory_bytes: int | None
    source: str


# Bytes of memory by the name in `DATA_SHEETS`, in gigabytes, from the same documents. A name that
# is sold with several sizes has the smallest.
_MEMORY = {
    "NVIDIA B200": 180,
    "NVIDIA H200 NVL": 141,
    "NVIDIA H200": 141,
    "NVIDIA H100 PCIe": 80,
    "NVIDIA H100 NVL": 94,
    "NVIDIA H100": 80,
    "NVIDIA A100-SXM4-80GB": 80,
    "NVIDIA A100 80GB PCIe": 80,
    "NVIDIA A100": 40,
    "NVIDIA L40S": 48,
    "NVIDIA L40": 48,
    "NVIDIA L4": 24,
    "NVIDIA A10": 24,
    "NVIDIA GeForce RTX 5090": 32,
    "NVIDIA GeForce RTX 4090": 24,
    "NVIDIA GeForce RTX 3090": 24,
    "Tesla V100": 16,
    "Tesla T4": 16,
}
_MAKERS = {"nvidia", "geforce", "tesla", "amd", "instinct", "intel"}  # left out of keys


def _key(name: str) -> str:
    """The name that users write: `rtx-4090` for "NVIDIA GeForce RTX 4090"."""
    return "-".join(word for word in name.lower().split() if word not in _MAKERS)


def _gpu(sheet: DeviceRates) -> Device:
    rates = dict.fromkeys(HALF, sheet.half)
    if sheet.name in WITHOUT_BFLOAT16:
        del rates["bfloat16"]
    memory = _MEMORY[sheet.name] * GIGABYTE
    return Device(
        sheet.name, sheet.memory, {**rates, "float32": sheet.single}, memory, sheet.source
    )


def _cpu(
    name: str,
    *,
    cores: int,
    clock: float,
    channels: int,
    transfers: float,
    float32: int,
    bfloat16: int,
    source: str,
) -> Device:
    """A CPU socket: rates are cores x base clock x operations a cycle and core; the bandwidth is
    channels x transfers a second x 8 bytes."""
    rates = {"float32": cores * clock * float32, "bfloat16": cores * clock * bfloat16}
    return Device(name, channels * transfers * 8, rates, None, source)


# Operations a cycle and core: vectors of float32 lanes x 2 for a multiply-add x units. Zen 4 runs
# 512-bit instructions on two 256-bit units: 2 x 8 x 2 = 32; Zen 5 and Golden Cove have two of 512
# bits: 64. A bfloat16 dot product does twice that; AMX 2 x 16 x 16 x 32 in 16 cycles: 1024.
_CPUS = (
    _cpu(
        "AMD EPYC 9654",
        cores=96,
        clock=2.4e9,
        channels=12,
        transfers=4.8e9,
        float32=32,
        bfloat16=64,
        source="AMD EPYC 9654 product page; Software Optimization Guide for Zen 4",
    ),
    _cpu(
        "AMD EPYC 9755",
        cores=128,
        clock=2.7e9,
        channels=12,
        transfers=6.4e9,
        float32=64,
        bfloat16=128,
        source="AMD EPYC 9755 product page; Software Optimization Guide for Zen 5",
    ),
    _cpu(
        "AMD Ryzen 9 7950X",
        cores=16,
        clock=4.5e9,
        channels=2,
        transfers=5.2e9,
        float32=32,
        bfloat16=64,
        source="AMD Ryzen 9 7950X product page; Software Optimization Guide for Zen 4",
    ),
    _cpu(
        "Intel Xeon Platinum 8480+",
        cores=56,
        clock=2.0e9,
        channels=8,
        transfers=4.8e9,
        float32=64,
        bfloat16=1024,
        source="Intel ARK, Xeon Platinum 8480+; Intel 64 Optimization Reference Manual",
    ),
)
_OTHERS = (
    Device(
        "AMD Instinct MI300X",
        5.3e12,
        {"float16": 1307.4e12, "bfloat16": 1307.4e12, "float32": 163.4e12},
        192 * GIGABYTE,
        "AMD Instinct MI300X data sheet",
    ),
)
DEVICES: Mapping[str, Device] = {
    _key(device.name): device for device in (*map(_gpu, DATA_SHEETS), *_OTHERS, *_CPUS)
}


def device_of(key: str) -> Device:
    """The device of this key; `"this"` is this machine.

    Raises:
        ValueError: if there is no such device.

    Examples:
        >>> from regard.plan.devices import device_of
        >>> device_of("h100").memory_bandwidth
        3350000000000.0
    """
    if key == THIS:
        return this_machine()
    found = DEVICES.get(_key(key))
    if found is None:
        raise ValueError(f"device={key!r} is not one of {', '.join((THIS, *DEVICES))}")
    return found


def is_measured() -> bool:
    """Whether `regard tune` measured this machine and stored its rates."""
    return read_speed(torch.get_num_threads()) is not None


def this_machine() -> Device:
    """This machine by the rates that `regard tune` stored; without them, by the usual ones of a
    processor with the same instructions.

    They are what kernels reach, not what the manufacturer states: bytes a second that `fused` reads
    while it decodes, matrix products in float32, and in bfloat16.
    """
    threads = torch.get_num_threads()
    stored = read_speed(threads)
    speed = stored or typical(threads)
    rates = {"float32": speed.products, **dict.fromkeys(HALF, speed.products_half)}
    named = f"this machine, {threads} thread{'' if threads == 1 else 's'}"
    source = "usual for such a processor; `regard tune` measures this one"
    return Device(named, speed.stream, rates, None, "measured by regard" if stored else source)


def roofline_seconds(
    flops: float | int, moved: float | int, device: Device, dtype: str
) -> tuple[float, str]:
    """The least time of some work, and what bounds it.

    The larger of `flops` at the device's rate and `moved` bytes at its bandwidth: the roofline
    (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785).

    Args:
        flops: floating-point operations.
        moved: bytes read and written.
        device: of `DEVICES`, or `this_machine()`.
        dtype: of the products.

    Returns:
        Seconds, and `"memory"` or `"compute"`.

    Raises:
        ValueError: if no rate of the device is known for the dtype.

    Examples:
        >>> from regard.plan.devices import device_of, roofline_seconds
        >>> roofline_seconds(989e9, 3.35e12, device_of("h100"), "bfloat16")
        (1.0, 'memory')
    """
    rate = device.flops.get(dtype)
    if rate is None:
        known = ", ".join(device.flops)
        raise ValueError(f"no rate of {device.name} in {dtype} is known, but in {known}")
    computing, moving = flops / rate, moved / device.memory_bandwidth
    return max(computing, moving), "compute" if computing > moving else "memory"
