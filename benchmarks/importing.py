"""What do importing regard, `regard describe` and `regard plan` add to importing torch?

python benchmarks/importing.py

New processes, interleaved. Targets: importing at most 50 ms, the commands at most 300 ms.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import finish

TORCH = "import torch"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
SIZES = ("--num-heads", "32", "--hidden-size", "4096", "--num-kv-heads", "8")


def seconds(*arguments: str) -> float:
    """Of a new Python with these arguments."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def programs(model: str) -> dict[str, tuple[tuple[str, ...], int]]:
    """The arguments of Python, and the milliseconds that are aimed at, by what is printed."""
    command = ("-m", "regard")
    return {
        "import regard": (("-c", "import regard; regard.attend"), 50),
        "regard describe": ((*command, "describe", model), 3_000),  # imports transformers
        "regard plan": ((*command, "plan", *SIZES, "--device", "h100"), 300),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        measured = programs(folder)
        alone, added = [], {name: [] for name in measured}
        for _ in range(9):
            alone.append(seconds("-c", TORCH))
            for name, (arguments, _) in measured.items():
                added[name].append(seconds(*arguments) - alone[-1])
    print(f"{TORCH} {1e3 * statistics.median(alone):.0f} ms")
    rows = []
    for name, (_, target) in measured.items():
        more = 1e3 * statistics.median(added[name])
        print(f"  {name} adds {more:.0f} ms; target {target}")
        rows.append({"program": name, "added_ms": more, "target": target})
    finish("importing", rows)


if __name__ == "__main__":
    main()
