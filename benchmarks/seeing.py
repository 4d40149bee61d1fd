"""What does looking at all heads add to a prefill? SmolLM2-135M, with regard installed.

python benchmarks/seeing.py 256 2048 16384        (numbers of tokens)

Seconds are those of the processor, summed over threads, which other work changes little.
From 4,096 tokens on, the model has its first layer only, and runs once.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import finish

import regard.hf
from regard.see import attention

ROUNDS = 3
LONG = 4096  # tokens from which one layer and one round are enough: 30 layers take minutes


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measured(model: Any, length: int) -> dict[str, float]:
    """Seconds of a prefill alone and of one that is looked at, interleaved."""
    ids = torch.randint(0, 1000, (1, length), generator=torch.Generator().manual_seed(0))

    def alone() -> None:
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)

    count = 1 if length >= LONG else ROUNDS
    rounds = [(seconds(alone), seconds(lambda: attention(model, ids))) for _ in range(count)]
    return {
        "tokens": length,
        "layers": len(model.model.layers),
        "prefill_s": statistics.median(first for first, _ in rounds),
        "looking_s": statistics.median(second for _, second in rounds),
    }


def main() -> None:
    model, _ = regard.hf.smollm2()
    regard.hf.install(model)
    results = []
    for length in sorted(int(each) for each in sys.argv[1:] or ("256", "2048")):
        if length >= LONG:
            model.model.layers = model.model.layers[:1]
        results.append(measured(model, length))
        line = "{tokens:,} tokens, layers {layers}: {prefill_s:.2f} s, looking {looking_s:.2f} s"
        print(line.format(**results[-1]), flush=True)
    finish("seeing", results)


if __name__ == "__main__":
    main()
