"""How fast is a prefill compared with torch's kernel? Causal, through `attend` and by hand.

    python benchmarks/prefill.py
    python benchmarks/prefill.py --training --lengths 2048     forward and backward

The limit is the time of the products alone, at the rate of the machine's largest: two of the causal
half forward, five backward, which computes the scores again. Of a training step it is that of
products in float32.

Targets, as a ratio of time to `sdpa(is_causal=True)`: at most 1.05 in float32, 1.02 of it at 4,096
tokens. In bfloat16, on CPUs with bfloat16 instructions and from 2,048 tokens on, 0.7, and 0.4 with
precision="fast"; where they are missing, 1.0. Of a training step, in float32, 0.9.
"""

import argparse
import functools

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
    chosen = prepare(q, k, v, mask=Causal()).name
    print(f"  regard.attend runs {chosen!r}; targets: {targets(dtype, length)}")
    limit = limit_of(2, length, heads, rows, dtype)
    shape = {"length": length, "heads": [heads, kv_heads], "dtype": name}
    return {**shape, "limit_ms": limit, "rows": rows}


def training(length: int, heads: int, kv_heads: int, dtype: torch.dtype, rounds: int) -> dict:
    """A step forward and backward."""
    q, upstream = torch.randn(2, 1, heads, length, HEAD_DIM).to(dtype).unbind()
    k, v = torch.randn(2, 1, kv_heads, length, HEAD_DIM).to(dtype).unbind()
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    gqa = heads != kv_heads
    forwards = {
        BASE: lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa),
        "regard.attend": lambda: attend(q, k, v, mask=Causal()),
    }
    steps = {
        name: lambda forward=forward: torch.autograd.grad(forward(), (q, k, v), upstream)
        for name, forward in forwards.items()
    }
    with torch.enable_grad():
        rows = summary(interleave(steps, rounds=rounds), BASE)
    name = str(dtype).removeprefix("torch.")
    card(f"causal training step, {length:,} tokens, heads {heads}/{kv_heads}, {name}", rows, BASE)
    limit = limit_of(7, length, heads, rows, torch.float32)
    shape = {"length": length, "heads": [heads, kv_heads], "dtype": name, "training": True}
    return {**shape, "limit_ms": limit, "rows": rows}


def limit_of(products: int, length: int, heads: int, rows: dict, dtype: torch.dtype) -> float:
    """The milliseconds of so many products over the causal half; prints the share of each row."""
    seconds = products * heads * length * length * HEAD_DIM / rate_of(dtype)
    shares = ", ".join(f"{name} {1e3 * seconds / row['ms']:.0%}" for name, row in rows.items())
    print(f"  the products alone take {1e3 * seconds:.1f} ms; share of it: {shares}")
    return 1e3 * seconds


@functools.cache
def rate_of(dtype: torch.dtype) -> float:
    """The rate of products. Of three in float32, as another program may take a part of one; in
    bfloat16 a processor without such instructions takes minutes."""
    return max(product_rate(dtype) for _ in range(3 if dtype is torch.float32 else 1))


def targets(dtype: torch.dtype, length: int) -> str:
    """The targets of a case, as ratios of time to torch's kernel."""
    if dtype == torch.float32:
        return "1.02" if length == 4096 else "1.05"
    return "0.70, fast 0.40" if length >= 2048 else "1.00"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048, 4096, 8192])
    parser.add_argument("--training", action="store_true", help="forward and backward")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    print(f"{THREADS} threads, {rate_of(torch.float32) / 1e9:.0f} GFLOP/s in float32 products")
    shapes = [
        (length, heads, kv_heads)
        for length in options.lengths
        for heads, kv_heads in ((16, 16), (32, 8))
    ]
    run, dtypes = training if options.training else case, (torch.float32, torch.bfloat16)
    results = [run(*shape, dtype, options.rounds) for dtype in dtypes for shape in shapes]
    finish("prefill", results)


if __name__ == "__main__":
    main()
