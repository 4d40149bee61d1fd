"""Rates of a machine as values, and what is known of its processor without measuring."""

import functools
import os
import platform
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import torch

MARGIN = 100.0  # times: a measured rate further than this from the default is taken for an error
NARROWING = ("ATEN_CPU_CAPABILITY", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")  # narrow the vectors


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
        products_half: floating-point operations a second in large bfloat16 matrix products.
        scores: scores a second whose softmax torch's SDPA computes.
        stream: bytes a second that `fused` reads from memory.
        fused: floating-point operations a second that `fused` does on many rows.
        tiled: floating-point operations a second that `tiled` does in products.
    """

    call: float = 4e-6
    products: float = 160e9
    elements: float = 4e9
    row_float: float = 7e9
    row_half: float = 2e9
    rows_half: float = 5e9
    products_half: float = 180e9
    scores: float = 2.5e9
    stream: float = 30e9
    fused: float = 350e9
    tiled: float = 300e9

    def objection(self) -> str | None:
        """Why these cannot be the rates of a machine, in a sentence; None if they can."""
        for rate in fields(self):
            value, usual = getattr(self, rate.name), getattr(DEFAULT, rate.name)
            if not usual / MARGIN <= value <= usual * MARGIN:
                return f"{rate.name}={value:.3g} is nowhere near the usual {usual:.3g}"
        return None


DEFAULT = Speed()


def vector_lanes() -> int:
    """Float32 lanes of a vector that `fused` is compiled for: 16, 8 or 4; without numba's help."""
    features = os.environ.get("NUMBA_CPU_FEATURES")
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
