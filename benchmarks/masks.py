"""What does a mask cost in a prefill? Its visible cells, or the whole rectangle.

python benchmarks/masks.py

Targets, as a ratio of time to torch's kernel given the same mask as a tensor: 0.25 for a window of
1,024 over 8,192 tokens, 0.12 for 16 documents of 512.
"""

import argparse

import torch
import torch.nn.functional as F
from common import THREADS, card, finish, interleave, summary

from regard import Causal, Documents, Mask, Padding, Prefix, SlidingWindow, Span, attend

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 8192, 8, 8, 128
BASE = "sdpa(mask as a tensor)"


def masks(length: int) -> dict[str, tuple[Mask, float | None]]:
    """Rules and their targets."""
    documents = Documents(torch.arange(length) // max(1, length // 16))
    window = Causal() & SlidingWindow(max(1, length // 8))
    return {
        "a window of an eighth": (window, 0.25),
        "16 documents": (documents, 0.12),
        "16 documents, causal": (Causal() & documents, None),
        "a window, and a prefix": (window | Prefix(max(1, length // 64)), None),
        "causal, the last quarter padding": (
            Causal() & Padding.from_lengths([length * 3 // 4], total=length),
            None,
        ),
    }


def case(
    name: str, mask: Mask, target: float | None, dtype: torch.dtype, length: int, rounds: int
) -> dict[str, object]:
    q = torch.randn(1, HEADS, length, HEAD_DIM).to(dtype)
    k, v = torch.randn(2, 1, KV_HEADS, length, HEAD_DIM).to(dtype).unbind()
    keep = mask.dense(Span(0, length, 0, length))
    while keep.dim() < 4:
        keep = keep[None]
    variants = {
        BASE: lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=keep),
        "regard.attend": lambda: attend(q, k, v, mask=mask),
    }
    rows = summary(interleave(variants, rounds=rounds), BASE)
    kind = str(dtype).removeprefix("torch.")
    card(f"{name}, {length:,} tokens, {HEADS} heads, {kind}", rows, BASE)
    visible = keep.double().mean().item()
    print(f"  {visible:.1%} of the cells are visible; target {target or 'none'}")
    return {"mask": name, "dtype": kind, "visible": visible, "target": target, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--length", type=int, default=LENGTH)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(f"{THREADS} threads")
    results = [
        case(name, mask, target, dtype, options.length, options.rounds)
        for dtype in (torch.float32, torch.bfloat16)
        for name, (mask, target) in masks(options.length).items()
    ]
    finish("masks", results)


if __name__ == "__main__":
    main()
