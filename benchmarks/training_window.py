"""What does training under a window cost? Forward and backward, in time and memory.

python benchmarks/training_window.py

Targets: 0.4 of the time of torch's kernel given the mask as a tensor, for a window of 1,024 over
8,192 tokens, 32 query heads on 8; peak(2 L) at most 2.2 times peak(L). Peaks are the process's own,
each in a new process, less what it held before the step.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from common import THREADS, card, finish, interleave, summary
from torch import Tensor

from regard import Causal, SlidingWindow, Span, attend

HEAD_DIM = 128
BASE = "sdpa(mask as a tensor)"
OURS = "regard.attend"
TARGET, GROWTH = 0.4, 2.2


def step(name: str, length: int, heads: list[int], dtype: torch.dtype) -> Callable[[], object]:
    """A training step on new tensors, under a window of an eighth of the length."""
    q = torch.randn(1, heads[0], length, HEAD_DIM).to(dtype).requires_grad_()
    k, v = (torch.randn(1, heads[1], length, HEAD_DIM).to(dtype).requires_grad_() for _ in range(2))
    mask = Causal() & SlidingWindow(max(1, min(1024, length // 8)))

    def ours() -> Tensor:
        return attend(q, k, v, mask=mask)

    keep = mask.dense(Span(0, length, 0, length)) if name == BASE else None

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True)

    forward = theirs if name == BASE else ours
    return lambda: torch.autograd.grad(forward().sum(), (q, k, v))


def once(name: str, length: int, heads: list[int], dtype: torch.dtype) -> float:
    """Bytes at the peak of a step, above those before it."""
    step(name, 64, heads, dtype)()  # libraries are loaded, threads started
    run = step(name, length, heads, dtype)
    before = highest()
    run()
    return highest() - before


def highest() -> float:
    """Bytes that this process held at most. What `resource` says of a child begins with the peak of
    its parent, so it is read from the system where that tells."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024.0 * float(status.read_text().partition("VmHWM:")[2].split()[0])
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak(name: str, length: int, heads: list[int], kind: str) -> float:
    given = ["--once", name, str(length), kind, "--heads", *map(str, heads)]
    command = [sys.executable, __file__, *given]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def case(length: int, heads: list[int], kind: str, rounds: int) -> dict[str, object]:
    steps = {name: step(name, length, heads, getattr(torch, kind)) for name in (BASE, OURS)}
    rows = summary(interleave(steps, rounds=rounds), BASE)
    card(
        f"training under a window, {length:,} tokens, heads {heads[0]}/{heads[1]}, {kind}",
        rows,
        BASE,
    )
    print(f"  target {TARGET}")
    peaks = {}
    for name in (BASE, OURS):
        half, whole = (peak(name, n, heads, kind) for n in (length // 2, length))
        peaks[name] = {"half": half, "whole": whole, "ratio": whole / max(half, 1.0)}
        sizes = (
            f"{half / 2**20:,.0f} and {whole / 2**20:,.0f} MiB at {length // 2:,} and {length:,}"
        )
        print(f"  {name:<24} peak {sizes}: {peaks[name]['ratio']:.2f} (target {GROWTH})")
    return {"length": length, "heads": heads, "dtype": kind, "rows": rows, "peaks": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", nargs=3, metavar=("NAME", "LENGTH", "DTYPE"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.once:
        name, length, kind = options.once
        print(json.dumps(once(name, int(length), options.heads, getattr(torch, kind))))
        return
    print(f"{THREADS} threads")
    results = [case(options.length, options.heads, kind, options.rounds) for kind in options.dtypes]
    finish("training_window", results)


if __name__ == "__main__":
    main()
