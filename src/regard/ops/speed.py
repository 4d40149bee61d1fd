"""Rates of processors as values, and what is known of this one without measuring.

A processor belongs to a class by the instructions that it has. The constants of the classes were
fitted by `benchmarks/fitting.py`: `AVX2` and `AVX512` to random calls on an AMD EPYC (Zen 4, then
Zen 5), the former without the longer vectors; `AMX` to the decoding steps and prefills of
`docs/benchmarks.json`, on an Intel Xeon. Only ratios of rates matter.
"""

import functools
import os
import platform
import statistics
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

NARROWING = (  # environment variables that leave instructions out
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "NUMBA_CPU_NAME",
    "NUMBA_CPU_FEATURES",
)
FARTHEST = 8.0  # times: a machine is at most so much faster or slower than the constants
APART = 3.0  # times: by which one rate may differ from the constants more than the median rate does


@dataclass(frozen=True)
class Speed:
    """Rates of one machine.

    Attributes:
        call: seconds to start one operator.
        products: floating-point operations a second in large float32 matrix products.
        elements: elements a second streamed by plain elementwise work, in float32.
        row_float: elements of keys and values a second when torch's SDPA streams them for one
            block of queries, in float32.
        row_half: the same in half precision, where one-row products are converted first.
        rows_half: the same for a block of several half-precision queries.
        products_half: floating-point operations a second in torch's SDPA of many half-precision
            queries.
        scores: scores a second whose softmax torch's SDPA computes.
        stream: bytes a second that `fused` reads from memory.
        fused: floating-point operations a second that `fused` does on many rows.
        tiled: floating-point operations a second that `tiled` does in products.
    """

    call: float
    products: float
    elements: float
    row_float: float
    row_half: float
    rows_half: float
    products_half: float
    scores: float
    stream: float
    fused: float
    tiled: float

    def objection(self, typical: "Speed") -> str | None:
        """Why these cannot be the rates of a machine whose class has the `typical` ones, in a
        sentence; None if they can.

        A rate may be `FARTHEST` times the typical one, and its ratio to it `APART` times the median
        of these ratios: backends are chosen by ratios of rates.
        """
        faster = {}
        for name, usual in asdict(typical).items():
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                return f"{name}={value:.3g} is no rate"
            faster[name] = usual / value if name == "call" else value / usual
        middle = statistics.median(faster.values())
        for name, times in faster.items():
            value = getattr(self, name)
            given = f"{name}={value:.3g} is {times:.2g} times as fast as usual for such a processor"
            if not 1 / FARTHEST <= times <= FARTHEST:
                return given
            if not 1 / APART <= times / middle <= APART:
                return f"{given}, and its other rates are about {middle:.2g} times as fast"
        return None

    def of_threads(self, threads: int) -> "Speed":
        """The rates of so many threads, if these are of one: products grow with the threads,
        reading up to `_FEEDING` threads."""
        reading = min(threads, _FEEDING)
        grown = {
            name: rate * (reading if name in _READING else threads)
            for name, rate in asdict(self).items()
            if name != "call"
        }
        return replace(self, **grown)


_READING = ("elements", "row_float", "row_half", "rows_half", "stream")
_FEEDING = 16  # threads that read as much as a processor's memory gives
_BY_PRODUCTS = ("products", "products_half")  # MKL and oneDNN choose their instructions
_BY_KERNELS = ("stream", "fused", "tiled")  # numba compiles these

# Of one thread.
AVX2 = Speed(
    call=4.5e-6, products=5.8e10, elements=2.0e9, row_float=1.6e9, row_half=1.0e9, rows_half=3.3e9,
    products_half=6.3e10, scores=2.0e9, stream=8.2e9, fused=6.6e10, tiled=1.5e11,
)  # fmt: skip
AVX512 = Speed(
    call=6.3e-6, products=6.3e10, elements=2.3e9, row_float=1.4e9, row_half=6.2e8, rows_half=2.9e9,
    products_half=4.5e10, scores=2.2e9, stream=1.3e10, fused=9.0e10, tiled=1.5e11,
)  # fmt: skip
AMX = Speed(
    call=5e-6, products=1.5e11, elements=2.0e9, row_float=2.6e9, row_half=4.2e9, rows_half=3.6e9,
    products_half=8.5e11, scores=3e9, stream=1.15e10, fused=1.1e11, tiled=9.5e11,
)  # fmt: skip
DEFAULT = AVX512.of_threads(2)


def typical(threads: int) -> Speed:
    """The constants of this processor for so many threads. Torch's kernels, products and compiled
    kernels have a class each, since environment variables narrow them separately."""
    of_torch, of_products, of_kernels = _classes()
    parts = {name: getattr(of_products, name) for name in _BY_PRODUCTS}
    parts |= {name: getattr(of_kernels, name) for name in _BY_KERNELS}
    return replace(of_torch, **parts).of_threads(threads)


def _classes() -> tuple[Speed, Speed, Speed]:
    """The classes of torch's kernels, of products and of compiled kernels. A processor of another
    kind than x86 has the constants of `AVX2`."""
    words = set(" ".join(processor()).lower().split())
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    found = AVX512 if words & {"avx512f", "avx512"} else AVX2
    if "amx_bf16" in words and ("AVX" not in limit or "AMX" in limit) and "SSE" not in limit:
        found = AMX
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return found if wide else AVX2, found, found if kernel_lanes() == 16 else AVX2


def kernel_lanes() -> int:
    """Float32 lanes of a vector that `fused` is compiled for: 16, 8 or 4; without numba's help."""
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None and os.environ.get("NUMBA_CPU_NAME", "").lower() == "generic":
        features = ""  # as numba has it
    if features is None:
        words = set(" ".join(processor()).lower().split())
    else:
        words = {word[1:] for word in features.split(",") if word.startswith("+")}
    return 16 if words & {"avx512f", "avx512"} else 8 if "avx2" in words else 4


@functools.cache
def processor() -> tuple[str, ...]:
    """What the system says of the processor, the names of its vector instructions among it."""
    known = "vendor_id", "cpu family", "model", "stepping", "cache size", "flags", "CPU", "Features"
    facts = [platform.machine(), str(os.cpu_count()), os.environ.get("PROCESSOR_IDENTIFIER", "")]
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0]
        facts += [line for line in first.splitlines() if line.startswith(known)]
    if len(facts) == 3:  # another system than Linux
        facts.append(torch.backends.cpu.get_cpu_capability())
    return tuple(facts)
