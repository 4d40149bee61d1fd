"""What takes the time of a whole model's step: products with weights, attention, or the rest?

    python benchmarks/step_shares.py                   SmolLM2-135M after 1,024 tokens
    python benchmarks/step_shares.py --context 16 --rounds 1

The compiled kernels of attention are timed inside of steps; the products by calling every linear
layer of the model once, in order, with one token. The rest is operators of norms and activations,
and Python of transformers and regard.
"""

import argparse
import statistics
import time
from unittest.mock import patch

import torch
from common import finish, introduce, read_bandwidth
from torch import nn

import regard.hf
from regard.bench.timing import interleave
from regard.ops.kernels import stepping


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    introduce("numba", "transformers")
    model, _ = regard.hf.smollm2(dtype=torch.float32)
    regard.hf.install(model)
    cache = regard.hf.cache(model)
    token = torch.zeros(1, 1, dtype=torch.int64)
    model(token.expand(1, options.context), past_key_values=cache, logits_to_keep=1)
    linears = [each for each in model.modules() if type(each) is nn.Linear]
    inputs = [torch.randn(1, 1, each.in_features) for each in linears]
    in_kernels: list[float] = []

    def timed(*call: object) -> None:
        begun = time.perf_counter()
        launch(*call)
        in_kernels[-1] += time.perf_counter() - begun

    def step() -> None:
        in_kernels.append(0.0)
        model(token, past_key_values=cache)
        cache.crop(-1)

    def products() -> None:
        for each, x in zip(linears, inputs, strict=True):
            each(x)

    launch = stepping.launch
    with patch.object(stepping, "launch", timed):
        times = interleave({"step": step, "products": products}, rounds=options.rounds)
    whole, linear = (1e3 * statistics.median(times[name]) for name in ("step", "products"))
    attention = 1e3 * statistics.median(in_kernels)
    weights = sum(each.weight.nbytes for each in linears)
    rows = {"products": linear, "attention": attention, "rest": whole - linear - attention}
    print(f"\na step after {options.context:,} tokens takes {whole:.1f} ms")
    for name, milliseconds in rows.items():
        print(f"  {name:<12}{milliseconds:>8.1f} ms {milliseconds / whole:>5.0%}")
    read = read_bandwidth(256)
    print(f"  weights of {weights / 1e6:.0f} MB are read at {weights / linear / 1e6:.1f} GB/s,")
    print(f"  where this machine reads memory at {read / 1e9:.1f} GB/s")
    finish("step_shares", [{"step": whole, **rows, "weights": weights, "read": read}])


if __name__ == "__main__":
    main()
