"""What does a mask cost in a prefill? Its visible cells, or the whole rectangle.

python benchmarks/masks.py

Targets, as a ratio of time to torch's kernel given the same mask as a tensor: 0.25 for a window of
1,024 over 8,192 tokens, 0.12 for 16 documents of 512. Of a quarter of this length: 1.02 for random
blocks, 0.6 for 8 rows of different lengths; and 1.0 of one call for each document, by hand.
"""

import argparse

import torch
import torch.nn.functional as F
from common import THREADS, card, finish, interleave, summary

from regard import Causal, Dense, Documents, Mask, Padding, Prefix, SlidingWindow, Span, attend

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 8192, 8, 8, 128
BASE = "sdpa(mask as a tensor)"
BY_HAND = "sdpa, piece by piece"


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


def _tensors(
    batch: int, length: int, dtype: torch.dtype, kv_heads: int = KV_HEADS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(batch, HEADS, length, HEAD_DIM).to(dtype)
    k, v = torch.randn(2, batch, kv_heads, length, HEAD_DIM).to(dtype).unbind()
    return q, k, v


def case(
    name: str,
    mask: Mask,
    target: float | None,
    dtype: torch.dtype,
    length: int,
    rounds: int,
    batch: int = 1,
) -> dict[str, object]:
    q, k, v = _tensors(batch, length, dtype)
    keep = mask.dense(Span(0, length, 0, length), batch=batch)
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


def documents_by_hand(dtype: torch.dtype, length: int, rounds: int) -> dict[str, object]:
    """Documents of a short text against one call for each, which needs no mask."""
    q, k, v = _tensors(1, length, dtype, kv_heads=2)
    sizes = [size.numel() for size in torch.arange(length).tensor_split(16)]
    ids = torch.arange(16).repeat_interleave(torch.tensor(sizes))
    mask = Causal() & Documents(ids)

    def by_hand() -> torch.Tensor:
        pieces = zip(*(x.split(sizes, 2) for x in (q, k, v)), strict=True)
        sdpa = F.scaled_dot_product_attention
        return torch.cat([sdpa(*piece, is_causal=True, enable_gqa=True) for piece in pieces], 2)

    variants = {BY_HAND: by_hand, "regard.attend": lambda: attend(q, k, v, mask=mask)}
    rows = summary(interleave(variants, rounds=rounds), BY_HAND)
    kind = str(dtype).removeprefix("torch.")
    card(f"16 documents, causal, {length:,} tokens, {HEADS} heads on 2, {kind}", rows, BY_HAND)
    print("  target 1.0")
    return {"mask": "documents by hand", "dtype": kind, "target": 1.0, "rows": rows}


def random_blocks(length: int) -> Dense:
    """A quarter of the blocks of 128 by 128, and the diagonal."""
    keep = torch.rand(-(-length // 128), -(-length // 128)) < 0.25
    keep = keep.fill_diagonal_(True).repeat_interleave(128, 0).repeat_interleave(128, 1)
    return Dense(keep[:length, :length].contiguous())


def short_cases(dtype: torch.dtype, length: int, rounds: int) -> list[dict[str, object]]:
    lengths = torch.linspace(length // 8, length, 8).long()
    padding = Causal() & Padding.from_lengths(lengths, total=length)
    return [
        *(documents_by_hand(dtype, size, rounds) for size in (length, length // 2)),
        case("random blocks", random_blocks(length), 1.02, dtype, length, rounds),
        case("8 rows of different lengths, causal", padding, 0.6, dtype, length, rounds, batch=8),
    ]


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
    for dtype in (torch.float32, torch.bfloat16):
        results += short_cases(dtype, options.length // 4, options.rounds)
    finish("masks", results)


if __name__ == "__main__":
    main()
