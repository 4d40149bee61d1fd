"""How long threads that wait should keep their cores: times of SmolLM2 for three settings.

python benchmarks/waiting.py --busy 0 4 --rounds 3

GNU's OpenMP reads the settings when torch is imported, so each run is a process of its own; runs of
the three take turns. transformers runs the model by itself: the threads are torch's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from cold_starts import busy
from common import finish

SETTINGS = {
    "default": {},
    "10,000 turns": {"GOMP_SPINCOUNT": "10000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
TOKENS, STEPS = 512, 20


def measure() -> dict[str, float]:
    """Seconds of a prefill and of a decoding step in this process, after a warm-up."""
    import torch

    from regard.cli.loading import load_for
    from regard.hf import fetch_smollm2
    from regard.hf.packages import quiet

    torch.set_num_threads(2)
    with quiet():
        model = load_for(fetch_smollm2(), dtype=None, device="cpu").model
    ids = torch.arange(1, TOKENS + 1)[None]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        start = time.perf_counter()
        model(ids)
        prefill = time.perf_counter() - start
        for step in range(STEPS + 3):
            if step == 3:
                start = time.perf_counter()
            model(ids[:, :1], past_key_values=cache)
    return {"prefill": prefill, "step": (time.perf_counter() - start) / STEPS}


def run(setting: dict[str, str]) -> dict[str, float]:
    others = {name for each in SETTINGS.values() for name in each}
    environment = {name: value for name, value in os.environ.items() if name not in others}
    done = subprocess.run(
        [sys.executable, __file__, "--here"],
        env={**environment, **setting},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 4], help="programs beside")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure()))
        return
    results = []
    for beside in options.busy:
        with busy(beside):
            rounds = [
                {name: run(setting) for name, setting in SETTINGS.items()}
                for _ in range(options.rounds)
            ]
        for name in SETTINGS:
            row = {
                what: statistics.median(each[name][what] for each in rounds)
                for what in ("prefill", "step")
            }
            results.append({"setting": name, "busy": beside, **row})
            print(
                f"{beside} busy programs, {name:13s} {TOKENS} tokens {row['prefill']:6.2f} s, "
                f"a step {row['step'] * 1e3:5.0f} ms",
                flush=True,
            )
    finish("waiting", results)


if __name__ == "__main__":
    main()
