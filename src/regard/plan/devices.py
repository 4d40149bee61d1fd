"""Devices of a plan by their data sheets, and this machine by its rates."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from regard.devices import DATA_SHEETS, DeviceRates
from regard.rates import read_speed, typical
from regard.words import counted

GIGABYTE = 10**9  # bytes; manufacturers state sizes of memory in it
HALF = ("float16", "bfloat16")
WITHOUT_BFLOAT16 = ("Tesla V100", "Tesla T4")  # their matrix units have no bfloat16
THIS = "this"


@dataclass(frozen=True)
class Device:
    """The rates of a device, by its data sheet or as measured."""

    name: str  # in full
    memory_bandwidth: float  # bytes a second
    # operations a second of dense matrix products, by dtype; of a dtype that is not there no time
    # is stated
    flops: Mapping[str, float]
    memory_bytes: int | None  # of its memory; None if that is not fixed by its name
    source: str  # the document that states it, or how it was measured


_MAKERS = {"nvidia", "geforce", "tesla", "amd", "instinct", "intel"}  # left out of keys


def _key(name: str) -> str:
    """The name that users write: `rtx-4090` for "NVIDIA GeForce RTX 4090"."""
    return "-".join(word for word in name.lower().split() if word not in _MAKERS)


def _gpu(sheet: DeviceRates) -> Device:
    rates = dict.fromkeys(HALF, sheet.half)
    if sheet.name in WITHOUT_BFLOAT16:
        del rates["bfloat16"]
    memory = None if sheet.gigabytes is None else sheet.gigabytes * GIGABYTE
    flops = {**rates, "float32": sheet.single}
    return Device(sheet.name, sheet.memory, flops, memory, sheet.source)


_AMD = "AMD Instinct MI300X"
_MI300X = DeviceRates(_AMD, 5.3e12, 1307.4e12, 163.4e12, 163.4e12, f"{_AMD} data sheet", 192)
DEVICES: Mapping[str, Device] = {_key(sheet.name): _gpu(sheet) for sheet in (*DATA_SHEETS, _MI300X)}


def device_of(key: str) -> Device:
    """The device of this key; `"this"` is this machine. Raises a ValueError if there is no such
    device."""
    if key == THIS:
        return this_machine()
    if (found := DEVICES.get(_key(key))) is None:
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
    named = f"this machine, {counted(threads, 'thread')}"
    source = "usual for such a processor; `regard tune` measures this one"
    return Device(named, speed.stream, rates, None, "measured by regard" if stored else source)


def roofline_seconds(
    flops: float | int, moved: float | int, device: Device, dtype: str
) -> tuple[float, str]:
    """The least time of some work in seconds, and what bounds it: `"memory"` or `"compute"`.

    The larger of `flops` at the device's rate and `moved` bytes at its bandwidth: the roofline
    (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785). A ValueError is raised if
    no rate of the device is known for the dtype of the products.

    Examples:
        >>> from regard.plan.devices import device_of, roofline_seconds
        >>> roofline_seconds(989e9, 3.35e12, device_of("h100"), "bfloat16")
        (1.0, 'memory')
    """
    if (rate := device.flops.get(dtype)) is None:
        known = ", ".join(device.flops)
        raise ValueError(f"no rate of {device.name} in {dtype} is known, but in {known}")
    computing, moving = flops / rate, moved / device.memory_bandwidth
    return max(computing, moving), "compute" if computing > moving else "memory"
