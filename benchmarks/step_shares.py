"""What takes the time of a whole model's step: its layers, the vocabulary, or Python?

    python benchmarks/step_shares.py                   SmolLM2-135M after 1,024 tokens
    python benchmarks/step_shares.py --context 16 --rounds 1

The compiled kernels of all layers, and that of the product with the vocabulary, are timed inside
of steps. The rest is Python of transformers and regard, and operators outside of the decoder.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from common import finish, introduce, read_bandwidth

import regard.hf
from regard.ops.kernels import chaining, sequencing

WARMING = 3  # steps that are not counted: the first is recorded, the next touch new memory


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
    times = {"layers": 0.0, "vocabulary": 0.0}
    rows: list[dict[str, float]] = []

    def timed(name: str, launch: Callable[..., None]) -> Callable[..., None]:
        def run(*call: object) -> None:
            begun = time.perf_counter()
            launch(*call)
            times[name] += 1e3 * (time.perf_counter() - begun)

        return run

    of_layers, of_vocabulary = sequencing.launch, chaining.launch
    with (
        patch.object(sequencing, "launch", timed("layers", of_layers)),
        patch.object(chaining, "launch", timed("vocabulary", of_vocabulary)),
    ):
        for _ in range(WARMING + options.rounds):
            times.update(layers=0.0, vocabulary=0.0)
            begun = time.perf_counter()
            model(token, past_key_values=cache)
            whole = 1e3 * (time.perf_counter() - begun)
            cache.crop(-1)
            rows.append({"step": whole, **times, "rest": whole - sum(times.values())})
    row = {name: statistics.median(each[name] for each in rows[WARMING:]) for name in rows[0]}
    head = model.lm_head.weight.nbytes
    layers = sum(each.nbytes for each in model.model.layers.parameters())
    cached = cache.nbytes
    print(f"\na step after {options.context:,} tokens takes {row['step']:.1f} ms")
    for name in ("layers", "vocabulary", "rest"):
        print(f"  {name:<12}{row[name]:>8.1f} ms {row[name] / row['step']:>5.0%}")
    read = read_bandwidth(256)
    rates = [(layers + cached) / row["layers"] / 1e6, head / row["vocabulary"] / 1e6]
    print(
        f"  {(layers + cached) / 1e6:.0f} MB of layers and cache are read at {rates[0]:.1f} GB/s,"
    )
    print(f"  {head / 1e6:.0f} MB of the vocabulary at {rates[1]:.1f} GB/s,")
    print(f"  where this machine reads memory at {read / 1e9:.1f} GB/s")
    sizes = {"layer_bytes": layers, "cached": cached, "vocabulary_bytes": head, "read": read}
    finish("step_shares", [{**row, **sizes}])


if __name__ == "__main__":
    main()
