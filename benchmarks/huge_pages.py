"""Do steps read weights faster from huge pages than from pages of 4 KiB?

    python benchmarks/huge_pages.py                    SmolLM2-135M after 1,024 tokens
    python benchmarks/huge_pages.py --rounds 1 --context 16

The weights of one model are in memory that torch allocates, those of another one in huge pages
(`regard.hf.to_huge_pages`, as `load` puts them). They take turns. Where Linux gives huge pages to
every program (`[always]` in the second line), both are alike.
"""

import argparse
import time
from dataclasses import asdict
from pathlib import Path

import torch
from common import finish, introduce

import regard.hf
from regard.turns import in_turns, ratio_of

KINDS = "plain", "huge"
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def step_of(dtype, context, *, huge):
    """A function that times a step of SmolLM2 after so many tokens."""
    model, _ = regard.hf.smollm2(dtype=dtype)
    if not huge:
        for each in model.parameters():
            each.data = each.data.clone()
    regard.hf.install(model)
    cache, token = regard.hf.cache(model), torch.zeros(1, 1, dtype=torch.int64)
    model(token.expand(1, context), past_key_values=cache, logits_to_keep=1)

    def step():
        begun = time.perf_counter()
        model(token, past_key_values=cache)
        seconds = time.perf_counter() - begun
        cache.crop(-1)
        return seconds

    return step


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    introduce("numba", "transformers")
    print(f"huge pages: {SETTING.read_text().strip() if SETTING.exists() else 'none'}\n")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        runs = {kind: step_of(dtype, options.context, huge=kind == "huge") for kind in KINDS}
        for run in [*runs.values()] * 4:  # the first steps are recorded, and compiled
            run()
        times = in_turns(runs, options.rounds)
        ratio = ratio_of(times["huge"], times["plain"])
        name = str(dtype).removeprefix("torch.")
        print(f"{name}: a step from huge pages takes {ratio} of the time")
        rows.append({"dtype": name, **asdict(ratio)})
    finish("huge_pages", rows)


if __name__ == "__main__":
    main()
