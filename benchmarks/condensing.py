"""The time that condensing takes and saves: a step over a condensed cache, and `condense` itself.

    python benchmarks/condensing.py
    python benchmarks/condensing.py --contexts 4096 --budgets 0.25 --formats none K8V4

SmolLM2-135M-Instruct with regard installed. Steps take turns with those over a growing cache that
holds the whole text; `condense` is divided by the prefill of the same text, each run once. The
bytes are those of the cache of the whole text. The text is of random tokens: time does not depend
on which of them stay.
"""

import argparse
import time
from typing import Any

import torch
from common import card, finish, interleave, introduce, summary

import regard.hf

PREFILL = 1024  # tokens that are read at a time


def filled(model: Any, tokens: torch.Tensor, kind: str, **options: Any) -> tuple[Any, float]:
    """A cache of this kind with all tokens, and the seconds that reading them took."""
    cache, begun = regard.hf.cache(model, kind, **options), time.perf_counter()
    for some in tokens.split(PREFILL, 1):
        model(some, past_key_values=cache, logits_to_keep=1)
    return cache, time.perf_counter() - begun


def measured(model: Any, context: int, given: argparse.Namespace) -> dict[str, Any]:
    """The steps after so many tokens, by name, and the seconds of prefill and `condense`."""
    tokens = torch.randint(3, 1000, (1, context), generator=torch.Generator().manual_seed(0))
    caches = {"growing": filled(model, tokens, "growing")[0]}
    whole, condensing = caches["growing"].nbytes, []
    for stored in given.formats:
        options = {} if stored == "none" else {"format": stored}
        for budget in given.budgets:
            cache, prefill = filled(model, tokens, "condensing", **options)
            begun = time.perf_counter()
            regard.hf.condense(cache, tokens, budget)
            name = f"condensed to {budget:.0%}" + f", {stored}" * bool(options)
            taken = {"prefill": prefill, "condense": time.perf_counter() - begun}
            condensing.append({"case": name, "bytes": cache.nbytes / whole, **taken})
            caches[name] = cache
    steps = {
        name: lambda its=cache: model(tokens[:, :1], past_key_values=its, logits_to_keep=1)
        for name, cache in caches.items()
    }
    rows = summary(interleave(steps, rounds=given.rounds, sample=0), "growing")
    card(f"a step after {context:,} tokens", rows, "growing")
    for row in condensing:
        share, times = f"{row['bytes']:.0%} of the bytes", row["condense"] / row["prefill"]
        print(f"  {row['case']:<36}{share}, condense takes {times:.1f} times the prefill")
    return {"context": context, "steps": rows, "condensing": condensing}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--formats", nargs="+", default=["none", "K8V4"])
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    introduce("transformers")
    model, _ = regard.hf.smollm2()
    regard.hf.install(model)
    finish("condensing", [measured(model, context, given) for context in given.contexts])


if __name__ == "__main__":
    main()
