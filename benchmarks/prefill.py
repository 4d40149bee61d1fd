"""What does the layer add to torch's kernel? Causal prefill through `attend` and by hand.

python benchmarks/prefill.py        (target: at most 1.05x)
"""

import argparse

import torch
import torch.nn.functional as F
from common import THREADS, card, finish, interleave, product_rate, summary

from regard import Causal, attend

HEAD_DIM = 128


def case(length: int, heads: int, kv_heads: int, rounds: int, rate: float) -> dict[str, object]:
    q = torch.randn(1, heads, length, HEAD_DIM)
    k, v = torch.randn(2, 1, kv_heads, length, HEAD_DIM).unbind()
    gqa = heads != kv_heads
    variants = {
        "sdpa(is_causal=True)": lambda: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=gqa
        ),
        "regard.attend": lambda: attend(q, k, v, mask=Causal()),
        "sdpa(mask as a tensor)": lambda: F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.ones(length, length, dtype=torch.bool).tril(), enable_gqa=gqa
        ),
    }
    rows = summary(interleave(variants, rounds=rounds), "sdpa(is_causal=True)")
    title = f"causal prefill, {length:,} tokens, heads {heads}/{kv_heads}"
    card(title, rows, "sdpa(is_causal=True)")
    flops = 2 * heads * length * length * HEAD_DIM  # two products over the causal half
    fraction = flops / (rows["regard.attend"]["ms"] / 1e3) / rate
    print(f"  {fraction:.0%} of the measured matrix-product rate; target 1.05")
    return {"length": length, "heads": [heads, kv_heads], "target": 1.05, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048])
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    rate = product_rate()
    print(f"{THREADS} threads, {rate / 1e9:.0f} GFLOP/s in float32 products")
    results = [
        case(length, heads, kv_heads, options.rounds, rate)
        for length in options.lengths
        for heads, kv_heads in ((16, 16), (32, 8))
    ]
    finish("prefill", results)


if __name__ == "__main__":
    main()
