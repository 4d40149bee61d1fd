"""How fast is a prefill compared with torch's kernel? Causal, through `attend` and by hand.

python benchmarks/prefill.py

Targets, as a ratio of time to `sdpa(is_causal=True)`: at most 1.05 in float32, 1.02 of it at 4,096
tokens. In bfloat16, on CPUs with bfloat16 instructions and from 2,048 tokens on, 0.7, and 0.4 with
precision="fast"; where they are missing, 1.0.
"""

import argparse

import torch
import torch.nn.functional as F
from common import THREADS, card, finish, interleave, product_rate, summary

from regard import Causal, attend, prepare

HEAD_DIM = 128
BASE = "sdpa(is_causal=True)"


def case(length: int, heads: int, kv_heads: int, dtype: torch.dtype, rounds: int) -> dict:
    q = torch.randn(1, heads, length, HEAD_DIM).to(dtype)
    k, v = torch.randn(2, 1, kv_heads, length, HEAD_DIM).to(dtype).unbind()
    gqa = heads != kv_heads
    lower = torch.ones(length, length, dtype=torch.bool).tril()
    sdpa = F.scaled_dot_product_attention
    variants = {
        BASE: lambda: sdpa(q, k, v, is_causal=True, enable_gqa=gqa),
        "regard.attend": lambda: attend(q, k, v, mask=Causal()),
        "sdpa(mask as a tensor)": lambda: sdpa(q, k, v, attn_mask=lower, enable_gqa=gqa),
    }
    if dtype == torch.bfloat16:
        variants["regard.attend, fast"] = lambda: attend(q, k, v, mask=Causal(), precision="fast")
    rows = summary(interleave(variants, rounds=rounds), BASE)
    name = str(dtype).removeprefix("torch.")
    card(f"causal prefill, {length:,} tokens, heads {heads}/{kv_heads}, {name}", rows, BASE)
    flops = 2 * heads * length * length * HEAD_DIM  # two products over the causal half
    fraction = flops / (rows["regard.attend"]["ms"] / 1e3) / product_rate(dtype)
    chosen = prepare(q, k, v, mask=Causal()).name
    print(f"  regard.attend runs {chosen!r}; targets: {targets(dtype, length)}")
    print(f"  {fraction:.0%} of the measured matrix-product rate in {name}")
    return {"length": length, "heads": [heads, kv_heads], "dtype": name, "rows": rows}


def targets(dtype: torch.dtype, length: int) -> str:
    """The targets of a case, as ratios of time to torch's kernel."""
    if dtype == torch.float32:
        return "1.02" if length == 4096 else "1.05"
    return "0.70, fast 0.40" if length >= 2048 else "1.00"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048, 4096, 8192])
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(f"{THREADS} threads, {product_rate() / 1e9:.0f} GFLOP/s in float32 products")
    results = [
        case(length, heads, kv_heads, dtype, options.rounds)
        for dtype in (torch.float32, torch.bfloat16)
        for length in options.lengths
        for heads, kv_heads in ((16, 16), (32, 8))
    ]
    finish("prefill", results)


if __name__ == "__main__":
    main()
