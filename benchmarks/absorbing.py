"""Absorbed latents in each dtype: is float32 the quicker way where a processor has no products?

Question: how long does a call of multi-head latent attention take with absorbed and with rebuilt
keys, for few and many new tokens, and which does `form="auto"` choose? Beside it the product that
absorbs the queries: as torch computes it in their dtype, as regard does, and in float32 from the
start, which is the limit.

    python benchmarks/absorbing.py
    python benchmarks/absorbing.py --dtypes float16 --keys 64 --tokens 1 8
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from common import THREADS, finish, interleave, processor, summary

from regard import Causal, KVCache, MultiHeadLatentAttention, Rotary, Span
from regard.layers.latent_forms import choose_form, multiply

HEADS, RANK, NOPE, ROTARY, HIDDEN = 16, 512, 128, 64, 1024
FORMS = ("absorbed", "expanded")


def layer_of(form: str, dtype: torch.dtype) -> MultiHeadLatentAttention:
    layer = MultiHeadLatentAttention(
        HIDDEN,
        HEADS,
        kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROTARY,
        v_head_dim=NOPE,
        rope=Rotary(ROTARY),
        mask=Causal(),
        form=form,
    )
    return layer.to(dtype).eval()


def step(
    layer: MultiHeadLatentAttention, tokens: int, keys: int, dtype: torch.dtype
) -> Callable[[], object]:
    """So many new tokens after a cache of the other keys, which are then taken back."""
    cache, before = KVCache(), keys - tokens
    if before:
        layer(torch.randn(1, before, HIDDEN, dtype=dtype), cache=cache)
    x = torch.randn(1, tokens, HIDDEN, dtype=dtype)

    def run() -> None:
        cache.truncate(min(before, cache.length))
        layer(x, cache=cache)

    return run


def products(tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """The product that absorbs the queries of so many tokens, in three ways."""
    rows = torch.randn(HEADS, tokens, NOPE).to(dtype)
    weights = torch.randn(HEADS, NOPE, RANK).to(dtype)
    wide = rows.float(), weights.float()
    return {
        "torch's product": lambda: rows @ weights,
        "regard's product": lambda: multiply(rows, weights),
        "in float32": lambda: wide[0] @ wide[1],
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--keys", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{', '.join(processor().values())}, {THREADS} threads")
    results: list[dict[str, Any]] = []
    for name in options.dtypes:
        dtype = getattr(torch, name)
        layers = {form: layer_of(form, dtype) for form in FORMS}
        for tokens in options.tokens:
            for keys in (keys for keys in options.keys if keys >= tokens):
                runs = {form: step(layers[form], tokens, keys, dtype) for form in FORMS}
                times = interleave({**runs, **products(tokens, dtype)}, rounds=options.rounds)
                rows = summary(times, "absorbed")
                span = Span(keys - tokens, keys, 0, keys)
                chosen = choose_form(layers["absorbed"], span).name
                found = ", ".join(f"{way} {row['ms']:.3g} ms" for way, row in rows.items())
                print(f"{name}, {tokens} x {keys}: {found}; auto: {chosen}", flush=True)
                results.append(
                    {"dtype": name, "tokens": tokens, "keys": keys, "chosen": chosen, "rows": rows}
                )
    finish("absorbing", results)


if __name__ == "__main__":
    main()
