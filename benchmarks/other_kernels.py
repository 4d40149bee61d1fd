"""How long does attention of auto-round-lib take on a CPU, beside regard's and torch's?

    python benchmarks/other_kernels.py
    python benchmarks/other_kernels.py --keys 64 --rounds 1

GQA of 32 query heads on 8 key heads of 128 in a decoding step, of 16 on 4 of 64 in a causal
prefill. Its kernels for bfloat16 and for codes need AVX-512; without it these run other code.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import card, finish, installed, interleave, introduce, summary
from torch import Tensor

from regard import Causal, attend


def contestants(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> dict[str, Callable[[], Any]]:
    """The same attention by each that is installed."""
    given: dict[str, Any] = {"mask": Causal()} if causal else {}
    runs: dict[str, Callable[[], Any]] = {
        "regard": lambda: attend(q, k, v, **given),
        "torch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
    }
    if installed("auto_round_kernel"):
        import auto_round_kernel

        runs["auto-round-lib"] = lambda: auto_round_kernel.sdpa(q, k, v, is_causal=causal)
    return runs


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=16384, help="of the step")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prefill")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    introduce("auto-round-lib")
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        step = torch.randn(1, 32, 1, 128), *torch.randn(2, 1, 8, options.keys, 128).unbind()
        read = torch.randn(1, 16, options.tokens, 64), *torch.randn(2, 1, 4, options.tokens, 64)
        for name, tensors in ((f"step, {options.keys:,} keys", step), ("prefill", read)):
            q, k, v = (each.to(dtype) for each in tensors)
            runs = contestants(q, k, v, causal=name == "prefill")
            rows = summary(interleave(runs, rounds=options.rounds), "regard")
            title = f"{name}, {str(dtype).removeprefix('torch.')}"
            card(title, rows, "regard")
            results.append({"case": title, "rows": rows})
    finish("other_kernels", results)


if __name__ == "__main__":
    main()
