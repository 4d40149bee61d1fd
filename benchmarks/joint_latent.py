"""How long does a step with a joint latent take, whose keys are computed anew at every step?

    python benchmarks/joint_latent.py                  SmolLM2-135M after 1,024 and 4,096 tokens
    python benchmarks/joint_latent.py --contexts 16 --rounds 1
    python benchmarks/joint_latent.py --dtype bfloat16

Installed models take a step in turns: as shipped, and with a joint latent of three quarters, half
and a quarter of the cache. Its numbers are random, since no time depends on them. The limit of a
latent is the time of its products at the machine's rate, measured beside: they rebuild the keys,
compare the queries with them and sum the latents.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import card, finish, interleave, introduce, product_rate, summary

import regard.hf
from regard import LatentKVAttention
from regard.hf import attention_modules, attention_of, place

SHARES = (0.75, 0.5, 0.25)
CHUNK = 1024  # tokens of the prompt that are read at a time


def with_latents(model: Any, share: float) -> tuple[Any, float]:
    """A copy with joint latents of this share of the cache, and the operations per key of a step
    of all layers."""
    copied, layers, operations = copy.deepcopy(model), [], 0.0
    for each in map(attention_of, attention_modules(copied).values()):
        width = each.num_kv_heads * each.head_dim
        rank = int(2 * width * share)
        operations += 2 * (rank * width + each.num_heads * (each.head_dim + rank))
        layer = LatentKVAttention(
            each.hidden_size,
            each.num_heads,
            num_kv_heads=each.num_kv_heads,
            head_dim=each.head_dim,
            kv_lora_rank=rank,
            rope=each.rope,
            mask=each.mask,
        )
        layers.append(layer.to(model.dtype).eval())
    return place(copied, layers), operations


def stepping(model: Any, context: int) -> Callable[[], object]:
    """A decoding step after so many tokens, which leaves the cache as it was."""
    regard.hf.install(model)
    cache, token = regard.hf.cache(model), torch.zeros(1, 1, dtype=torch.int64)
    for chunk in token.expand(1, context).split(CHUNK, 1):
        model(chunk, past_key_values=cache, logits_to_keep=1)

    def run() -> None:
        model(token, past_key_values=cache)
        cache.crop(-1)

    return run


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the cache")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    introduce("numba", "transformers")
    model, _ = regard.hf.smollm2(dtype=getattr(torch, options.dtype))
    results = []
    for context in options.contexts:
        steps, operations = {"as shipped": stepping(copy.deepcopy(model), context)}, {}
        for share in options.shares:
            changed, operations[f"joint latent, {share:.0%}"] = with_latents(model, share)
            steps[f"joint latent, {share:.0%}"] = stepping(changed, context)
        times = interleave(steps, rounds=options.rounds)
        rows = summary(times, "as shipped")
        card(f"a step after {context:,} tokens, {options.dtype}", rows, "as shipped")
        rate = product_rate()  # the kernel multiplies in float32
        for name, each in operations.items():
            limit = 1e3 * each * context / rate
            more = statistics.median(
                1e3 * (own - base)
                for own, base in zip(times[name], times["as shipped"], strict=True)
            )
            rows[name] |= {"limit_ms": limit, "more_ms": more}
            print(f"  {name}: {more:.0f} ms more; products at {rate / 1e9:.0f} GFLOP/s {limit:.0f}")
        results.append({"case": f"{context} tokens, {options.dtype}", "rows": rows})
    finish("joint_latent", results)


if __name__ == "__main__":
    main()
