"""How much faster is reading each key once? One decoding step against torch's own, keys cold.

python benchmarks/decode_gqa.py

Targets, as a ratio of time: 32 heads on 8, float32, 0.40 at 4,096 keys and 0.20 at 16,384; bfloat16
0.14 and 0.13; 32 heads on 32, bfloat16, 0.40 at 4,096. At least 0.42 of the machine's read
bandwidth in float32 at 16,384.
"""

import argparse

import torch
import torch.nn.functional as F
from common import THREADS, Cold, card, finish, interleave, read_bandwidth, summary

from regard import Causal, Span, attend, explain

HEADS, HEAD_DIM = 32, 128
TARGETS = {
    (8, torch.float32, 4096): 0.40,
    (8, torch.float32, 16384): 0.20,
    (8, torch.bfloat16, 4096): 0.14,
    (8, torch.bfloat16, 16384): 0.13,
    (32, torch.bfloat16, 4096): 0.40,
}


def case(
    kv_heads: int, dtype: torch.dtype, keys: int, rounds: int, bandwidth: float
) -> dict[str, object]:
    capacity = keys + keys // 2  # a growing cache holds a view into a larger buffer
    nbytes = 2 * kv_heads * keys * HEAD_DIM * dtype.itemsize

    def buffers() -> tuple[torch.Tensor, torch.Tensor]:
        k, v = torch.randn(2, 1, kv_heads, capacity, HEAD_DIM).to(dtype).unbind()
        return k[:, :, :keys], v[:, :, :keys]

    cold = Cold(buffers, nbytes)
    q = torch.randn(1, HEADS, 1, HEAD_DIM).to(dtype)
    span = Span(keys - 1, keys, 0, keys)
    sdpa = F.scaled_dot_product_attention
    variants = {
        "sdpa(enable_gqa=True)": lambda: sdpa(q, *cold(), enable_gqa=kv_heads != HEADS),
        "regard.attend": lambda: attend(q, *cold(), mask=Causal(), span=span),
    }
    rows = summary(interleave(variants, rounds=rounds), "sdpa(enable_gqa=True)")
    name = str(dtype).removeprefix("torch.")
    card(f"{HEADS} heads on {kv_heads}, {keys:,} keys, {name}", rows, "sdpa(enable_gqa=True)")
    k, v = cold()
    print("  " + explain(q, k, v, mask=Causal(), span=span).replace("\n", "\n  "))
    fraction = nbytes / (rows["regard.attend"]["ms"] / 1e3) / bandwidth
    target = TARGETS.get((kv_heads, dtype, keys))
    print(f"  {fraction:.0%} of the measured read bandwidth; target {target or 'none'}")
    shape = {"kv_heads": kv_heads, "dtype": name, "keys": keys}
    return {**shape, "target": target, "of_bandwidth": fraction, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--keys", type=int, nargs="+", default=[1024, 4096, 16384])
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    bandwidth = read_bandwidth()
    print(f"{THREADS} threads, {bandwidth / 1e9:.1f} GB/s read")
    results = [
        case(8, dtype, keys, options.rounds, bandwidth)
        for dtype in (torch.float32, torch.bfloat16)
        for keys in options.keys
    ]
    results += [case(32, torch.bfloat16, 4096, options.rounds, bandwidth)]
    finish("decode_gqa", results)


if __name__ == "__main__":
    main()
