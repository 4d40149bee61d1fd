"""Links between devices: bytes that a rank can send in a second, and the latency of a message."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What carries the messages of a rank, by documents.

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
        >>> from regard.plan.links import link_of
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
        >>> from regard.plan.links import link_of, link_seconds
        >>> link_seconds(450e9, 0, link_of("nvlink-4"))
        1.0
    """
    return steps * link.latency + nbytes / link.bytes_per_second
