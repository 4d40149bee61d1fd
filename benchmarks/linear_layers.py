"""Products with a model's weights: regard's in an installed model, torch's, the memory's limit.

    python benchmarks/linear_layers.py                  SmolLM2-135M, 1 to 256 tokens, both dtypes
    python benchmarks/linear_layers.py --tokens 1 --rounds 1
    python benchmarks/linear_layers.py --dtypes float16 --tokens 256

Every linear layer of the model multiplies so many tokens, one layer after the other, so that each
weight is read from memory; then the whole model: up to 8 tokens a decoding step of as many
sequences, else a prompt of so many tokens, with and without `install(model, linear=False)`. The
limit is the time in which the machine reads the weights.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import finish, introduce, read_bandwidth
from torch import Tensor, nn

import regard.hf
from regard.bench.timing import interleave
from regard.matrices import MOST_ROWS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Run = Callable[[], Any]
PROMPT = 128  # tokens before the decoding steps


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 32, 256])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    introduce("numba", "transformers")
    rows = [
        measured(dtype, tokens, options.rounds)
        for dtype in options.dtypes
        for tokens in options.tokens
    ]
    finish("linear_layers", rows)


def measured(dtype: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of one dtype and number of tokens, printed and returned."""
    models = {name: regard.hf.smollm2(dtype=DTYPES[dtype])[0] for name in ("regard", "torch")}
    for name, model in models.items():
        regard.hf.install(model, linear=name == "regard")
    kinds = {"products": products_of, "model": step_of if tokens <= MOST_ROWS else prompt_of}
    weights = sum(each.weight.nbytes for each in linears(models["torch"]))
    row: dict[str, Any] = {
        "dtype": dtype,
        "tokens": tokens,
        "limit": 1e3 * weights / read_bandwidth(256),
    }
    for kind, make in kinds.items():
        times = interleave(
            {name: make(model, tokens) for name, model in models.items()}, rounds=rounds
        )
        for name, seconds in times.items():
            row[f"{kind}, {name}"] = 1e3 * statistics.median(seconds)
        pairs = zip(times["regard"], times["torch"], strict=True)
        row[f"{kind}, ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
    figures = "  ".join(f"{k} {v:.2f}" for k, v in row.items() if isinstance(v, float))
    print(f"{dtype} {tokens:>3} tokens  {figures}")
    return row


def linears(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if type(each) is nn.Linear]


def products_of(model: nn.Module, tokens: int) -> Run:
    """Each linear layer of the model once."""
    layers = linears(model)
    inputs = [each.weight.new_ones(tokens, each.in_features) for each in layers]

    def products() -> None:
        for each, x in zip(layers, inputs, strict=True):
            each(x)

    return products


def step_of(model: Any, tokens: int) -> Run:
    """A decoding step of so many sequences, which is then forgotten."""
    cache, token = regard.hf.cache(model), torch.zeros(tokens, 1, dtype=torch.int64)
    prompt: Tensor = token.expand(tokens, PROMPT)
    model(prompt, past_key_values=cache, logits_to_keep=1)

    def step() -> None:
        model(token, past_key_values=cache)
        cache.crop(-1)

    return step


def prompt_of(model: Any, tokens: int) -> Run:
    """A prompt of so many tokens."""
    prompt = torch.zeros(1, tokens, dtype=torch.int64)
    return lambda: model(prompt, logits_to_keep=1)


if __name__ == "__main__":
    main()
