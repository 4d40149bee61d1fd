"""Devices and links of a plan by their data sheets, and this machine by its rates."""

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
    """The rates of a device, by its data sheet or as measured.

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


# CPU sockets: cores, base clock, channels of memory, transfers a second on each, operations of a
# core and cycle in float32 and in bfloat16, source. Operations: vectors of float32 lanes x 2 for a
# multiply-add x units. Zen 4 runs 512-bit instructions on two 256-bit units: 2 x 8 x 2 = 32; Zen 5
# and Golden Cove have two of 512 bits: 64. A bfloat16 dot product does twice that; AMX 2 x 16 x 16
# x 32 in 16 cycles: 1024.
_ZEN = "Software Optimization Guide for Zen"
_CPUS = {
    "AMD EPYC 9654": (96, 2.4e9, 12, 4.8e9, 32, 64, f"AMD EPYC 9654 product page; {_ZEN} 4"),
    "AMD EPYC 9755": (128, 2.7e9, 12, 6.4e9, 64, 128, f"AMD EPYC 9755 product page; {_ZEN} 5"),
    "AMD Ryzen 9 7950X": (
        *(16, 4.5e9, 2, 5.2e9, 32, 64),
        f"AMD Ryzen 9 7950X product page; {_ZEN} 4",
    ),
    "Intel Xeon Platinum 8480+": (
        *(56, 2.0e9, 8, 4.8e9, 64, 1024),
        "Intel ARK, Xeon Platinum 8480+; Intel 64 Optimization Reference Manual",
    ),
}


def _cpu(name: str) -> Device:
    """A CPU socket: rates are cores x clock x operations; each transfer has 8 bytes."""
    cores, clock, channels, transfers, float32, bfloat16, source = _CPUS[name]
    rates = {"float32": cores * clock * float32, "bfloat16": cores * clock * bfloat16}
    return Device(name, channels * transfers * 8, rates, None, source)


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
    _key(device.name): device for device in (*map(_gpu, DATA_SHEETS), *_OTHERS, *map(_cpu, _CPUS))
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


@dataclass(frozen=True)
class Link:
    """A link between ranks, with rates from the documents of its makers.

    Args:
        name: in full.
        bytes_per_second: that a rank sends at most, while it receives as many.
        latency: seconds until the first byte of a message arrives, at least.
        source: the documents that state them.
    """

    name: str
    bytes_per_second: float
    latency: float
    source: str


# Seconds that NCCL's own model of time counts for one step of a ring of large messages ("Simple"):
# `hwLat` in src/graph/tuning.cc of github.com/NVIDIA/nccl, in microseconds by kind of link.
_NVLINK, _PCIE, _NETWORK = 3.4e-6, 5.7e-6, 9.6e-6
_LATENCY = "latency: NCCL, src/graph/tuning.cc"

LINKS: Mapping[str, Link] = {
    # 900 GB/s in both directions together
    "nvlink-4": Link("NVLink 4", 450e9, _NVLINK, f"NVIDIA H100 data sheet; {_LATENCY}"),
    # 1.8 TB/s in both directions together
    "nvlink-5": Link("NVLink 5", 900e9, _NVLINK, f"NVIDIA HGX B200 data sheet; {_LATENCY}"),
    # 16 lanes of 32 GT/s, of which 128 of 130 bits are data
    "pcie-5": Link(
        "PCI Express 5.0 x16",
        16 * 32e9 * 128 / 130 / 8,
        _PCIE,
        f"PCI Express Base Specification 5.0; {_LATENCY}",
    ),
    # 400 Gb/s in each direction, a port for each rank
    "infiniband-ndr": Link(
        "InfiniBand NDR", 50e9, _NETWORK, f"NVIDIA ConnectX-7 data sheet; {_LATENCY}"
    ),
    # 100 Gb/s in each direction, a port for each rank
    "ethernet-100": Link("100 Gb/s Ethernet", 12.5e9, _NETWORK, f"IEEE 802.3ba-2010; {_LATENCY}"),
}


def link_of(key: str) -> Link:
    """The link of this key.

    Raises:
        ValueError: if there is none.

    Examples:
        >>> from regard.plan.devices import link_of
        >>> link_of("nvlink-4").bytes_per_second
        450000000000.0
    """
    if key not in LINKS:
        raise ValueError(f"link={key!r} is not one of {', '.join(LINKS)}")
    return LINKS[key]


def link_seconds(nbytes: float | int, steps: int, link: Link) -> float:
    """Seconds to send so many bytes in so many steps, each of which waits for the one before.

    The latency of each step, and the bytes at the link's rate: the model of Hockney 1994,
    doi:10.1016/S0167-8191(06)80021-9.

    Args:
        nbytes: that a rank sends in all.
        steps: messages, or exchanges of messages at the same time, one after another.
        link: of `LINKS`.

    Examples:
        >>> from regard.plan.devices import link_of, link_seconds
        >>> link_seconds(450e9, 0, link_of("nvlink-4"))
        1.0
    """
    return steps * link.latency + nbytes / link.bytes_per_second
