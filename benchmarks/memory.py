"""How does training's memory grow with the length? Forward and backward, each in a new process.

python benchmarks/memory.py        (target: peak(4 L) at most 4.4 times peak(L))

The peak is the process's own, less what it held before the call.
"""

import argparse
import json
import resource
import subprocess
import sys
from typing import Any

import torch
from common import finish

from regard import Alibi, Causal, Documents, Padding, SlidingWindow, attend

HEADS, HEAD_DIM = 4, 64
BACKENDS = ("auto", "eager")


def options_of(name: str, length: int) -> dict[str, Any]:
    """Options of a call besides queries, keys and values."""
    return {
        "causal": {"mask": Causal()},
        "window": {"mask": Causal() & SlidingWindow(1024)},
        "documents": {"mask": Causal() & Documents(torch.arange(length) // 512)},
        "padding": {"mask": Causal() & Padding.from_lengths([length - 9], total=length)},
        "softcap": {"mask": Causal(), "softcap": 30.0},
        "sinks": {"mask": Causal(), "sinks": torch.zeros(HEADS)},
        "ALiBi": {"mask": Causal(), "score_bias": Alibi.for_heads(HEADS)},
    }[name]


KINDS = ("causal", "window", "documents", "padding", "softcap", "sinks", "ALiBi")


def once(kind: str, length: int, backend: str) -> float:
    """Bytes at the peak of a training step, above those before it."""
    q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3))
    small = [x[:, :, :256].detach().requires_grad_() for x in (q, k, v)]
    attend(*small, mask=Causal()).sum().backward()  # libraries are loaded, threads started
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attend(q, k, v, backend=backend, **options_of(kind, length)).sum().backward()
    return 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def peak(kind: str, length: int, backend: str) -> float:
    command = [sys.executable, __file__, "--once", kind, str(length), backend]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", nargs=3, metavar=("KIND", "LENGTH", "BACKEND"))
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    options = parser.parse_args()
    if options.once:
        kind, length, backend = options.once
        print(json.dumps(once(kind, int(length), backend)))
        return
    length, results = options.length, []
    print(f"peak of a training step in MiB, {length:,} and {4 * length:,} tokens, and their ratio")
    for kind in options.kinds:
        row: dict[str, Any] = {"kind": kind}
        for backend in BACKENDS:
            few, many = (peak(kind, n, backend) for n in (length, 4 * length))
            row[backend] = {"few": few, "many": many, "ratio": many / max(few, 1.0)}
            sizes = f"{few / 2**20:>9.1f}{many / 2**20:>9.1f}{many / max(few, 1.0):>8.2f}"
            print(f"  {kind:<12}{backend:<8}{sizes}", flush=True)
        results.append(row)
    finish("memory", results)


if __name__ == "__main__":
    main()
