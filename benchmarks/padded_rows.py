"""What does left padding cost a decoding step of a batch of prompts of different lengths?

    python benchmarks/padded_rows.py                 SmolLM2-135M, four rows of up to 1,024 tokens
    python benchmarks/padded_rows.py --dtype bfloat16 --rows 8
    python benchmarks/padded_rows.py --context 16 --rounds 1

A step of an installed model after rows of equal lengths, the same after rows that are padded, and
that of transformers after padded rows, in turns. The first row is padded to half of the context,
the last is not padded.
"""

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from common import card, finish, interleave, introduce, summary

import regard.hf

BASE = "rows of equal lengths"


def stepping(model: Any, cache: Any, mask: torch.Tensor) -> Callable[[], object]:
    """A decoding step after a prompt under a mask, which leaves the cache as it was."""
    rows, context = mask.shape
    ids = torch.arange(context).expand(rows, context) % 1000
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    given = {"past_key_values": cache, "logits_to_keep": 1}
    model(ids, attention_mask=mask, position_ids=positions, **given)
    given |= {"attention_mask": torch.cat([mask, mask[:, -1:]], 1)}
    given |= {"position_ids": positions[:, -1:] + 1}

    def run() -> None:
        model(ids[:, -1:], **given)
        cache.crop(-1)

    return run


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    introduce("numba", "transformers")
    from transformers import DynamicCache

    theirs, _ = regard.hf.smollm2(dtype=getattr(torch, options.dtype))
    ours = copy.deepcopy(theirs)
    regard.hf.install(ours)
    whole = torch.ones(options.rows, options.context, dtype=torch.int64)
    padded = whole.clone()
    for row in range(options.rows):
        padded[row, : (options.rows - 1 - row) * options.context // (2 * options.rows)] = 0
    steps = {
        BASE: stepping(ours, regard.hf.cache(ours), whole),
        "padded rows": stepping(ours, regard.hf.cache(ours), padded),
        "padded rows, int8 cache": stepping(ours, regard.hf.cache(ours, "int8"), padded),
        "padded rows, transformers": stepping(theirs, DynamicCache(), padded),
    }
    for run in steps.values():
        run()
    rows = summary(interleave(steps, rounds=options.rounds), BASE)
    case = f"{options.rows} rows, {options.context:,} tokens, {options.dtype}"
    card(f"a step of SmolLM2-135M: {case}", rows, BASE)
    finish("padded_rows", [{"case": case, "rows": rows}])


if __name__ == "__main__":
    main()
