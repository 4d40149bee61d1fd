"""torch.compile of a layer: decoding with a StaticCache, and a training step, each as one graph.

`fullgraph=True` makes a graph break an error. Decoding compiles twice: for the first length, and
then for every length. The backend `aot_eager` traces the graphs and runs them as they are, so it
is no faster than eager; `inductor` compiles them to machine code.

    python examples/compile_layer.py aot_eager   # seconds
    python examples/compile_layer.py inductor    # about a minute, with a C++ compiler
"""

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from regard import Attention, Causal, Rotary, StaticCache

PROMPT, STEPS, LONGEST, WIDTH = 64, 64, 256, 256
Forward = Callable[..., Tensor]  # the layer, or the compiled layer


@torch.no_grad()
def decode(layer: Attention, forward: Forward, x: Tensor) -> tuple[Tensor, list[float]]:
    """The outputs for the tokens after the prompt, and the seconds that each took."""
    cache, outputs, seconds = StaticCache(LONGEST), [], []
    layer(x[:, :PROMPT], cache=cache)
    for token in x[:, PROMPT:].split(1, dim=1):
        start = time.perf_counter()
        outputs.append(forward(token, cache=cache))
        seconds.append(time.perf_counter() - start)
    return torch.cat(outputs, dim=1), seconds


def train(layer: Attention, forward: Forward, x: Tensor) -> tuple[Tensor, list[float]]:
    """The gradient as one vector, and the seconds that each forward and backward took."""
    seconds = []
    for _ in range(10):
        layer.zero_grad()
        start = time.perf_counter()
        forward(x).square().mean().backward()
        seconds.append(time.perf_counter() - start)
    return torch.cat([each.grad.flatten() for each in layer.parameters()]), seconds


def median_ms(seconds: list[float]) -> float:
    return 1000 * sorted(seconds)[len(seconds) // 2]


def main(backend: str = "aot_eager") -> None:
    torch.manual_seed(0)
    layer = Attention(WIDTH, 8, num_kv_heads=2, rope=Rotary(32), mask=Causal())
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    text, batch = torch.randn(1, PROMPT + STEPS, WIDTH), torch.randn(4, PROMPT, WIDTH)
    print(f"{backend:<18}eager ms  compiled ms  compiled in  largest difference")
    for name, run, x in (("a decoding step", decode, text), ("a training step", train, batch)):
        expected, eager_seconds = run(layer, layer, x)
        result, seconds = run(layer, compiled, x)
        eager, fast, first = median_ms(eager_seconds), median_ms(seconds), sum(seconds[:2])
        apart = (result - expected).abs().max() / expected.abs().max()
        print(f"{name:<18}{eager:>8.2f}{fast:>13.2f}{first:>11.1f} s{apart:>20.0e}")
        assert apart < 100 * torch.finfo(x.dtype).eps


if __name__ == "__main__":
    main(*sys.argv[1:])
