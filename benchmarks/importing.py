"""What does importing regard add to importing torch? New processes, interleaved.

python benchmarks/importing.py        (target: at most 50 ms)
"""

import statistics
import subprocess
import sys
import time

from common import finish


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main() -> None:
    rounds = [(seconds("import torch"), seconds("import regard")) for _ in range(9)]
    alone = statistics.median(torch for torch, _ in rounds)
    added = statistics.median(regard - torch for torch, regard in rounds)
    print(f"import torch {1e3 * alone:.0f} ms, regard adds {1e3 * added:.0f} ms; target 50")
    finish("importing", [{"torch_ms": 1e3 * alone, "added_ms": 1e3 * added, "target": 50}])


if __name__ == "__main__":
    main()
