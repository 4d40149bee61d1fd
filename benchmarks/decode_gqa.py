"""How much faster is folding the group? One GQA decode step against torch's own, keys cold.

python benchmarks/decode_gqa.py        (targets at 4,096 keys: 0.6 in float32, 0.16 in bfloat16)
"""

import argparse

import torch
import torch.nn.functional as F
from common import THREADS, Cold, card, finish, interleave, read_bandwidth, summary

from regard import Causal, Span, attend, explain

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
TARGETS = {(torch.float32, 4096): 0.6, (torch.bfloat16, 4096): 0.16}


def case(dtype: torch.dtype, keys: int, rounds: int, bandwidth: float) -> dict[str, object]:
    capacity = keys + keys // 2  # a growing cache holds a view into a larger buffer
    nbytes = 2 * KV_HEADS * keys * HEAD_DIM * dtype.itemsize

    def buffers() -> tuple[torch.Tensor, torch.Tensor]:
        k, v = torch.randn(2, 1, KV_HEADS, capacity, HEAD_DIM).to(dtype).unbind()
        return k[:, :, :keys], v[:, :, :keys]

    cold = Cold(buffers, nbytes)
    q = torch.randn(1, HEADS, 1, HEAD_DIM).to(dtype)
    span = Span(keys - 1, keys, 0, keys)
    sdpa = F.scaled_dot_product_attention
    variants = {
        "sdpa(enable_gqa=True)": lambda: sdpa(q, *cold(), enable_gqa=True),
        "regard.attend": lambda: attend(q, *cold(), mask=Causal(), span=span),
    }
    rows = summary(interleave(variants, rounds=rounds), "sdpa(enable_gqa=True)")
    name = str(dtype).removeprefix("torch.")
    card(f"GQA {HEADS}/{KV_HEADS}, {keys:,} keys, {name}", rows, "sdpa(enable_gqa=True)")
    k, v = cold()
    print("  " + explain(q, k, v, mask=Causal(), span=span).replace("\n", "\n  "))
    fraction = nbytes / (rows["regard.attend"]["ms"] / 1e3) / bandwidth
    target = TARGETS.get((dtype, keys))
    print(f"  {fraction:.0%} of the measured read bandwidth; target {target or 'none'}")
    return {"dtype": name, "keys": keys, "target": target, "of_bandwidth": fraction, "rows": rows}


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
        case(dtype, keys, options.rounds, bandwidth)
        for dtype in (torch.float32, torch.bfloat16)
        for keys in options.keys
    ]
    finish("decode_gqa", results)


if __name__ == "__main__":
    main()
