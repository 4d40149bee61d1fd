"""Is the choice of a backend the same in every process, whatever else runs?

    python benchmarks/same_choice.py        (target: one list of choices, one of results, no file)

Processes are started beside 0, 1, 2 and 4 busy programs, and beside `pip install`. Each chooses a
backend for the same random calls, and runs the small ones. Their choices and the bits of their
results are compared, and the folder for files must stay empty.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from choosing import Shape, shapes
from common import THREADS, Store, finish

from regard import attend, prepare

BUSY = (0, 1, 2, 4)  # programs that keep a processor busy each
SMALL = 1 << 22  # products of queries and keys: such calls are run
SPIN = "while True: sum(range(10**6))"
INSTALL = "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", "numpy", "--target"


def choices(seed: int, count: int) -> dict[str, Any]:
    """The backends of random calls, and a digest of the results of small ones."""
    torch.manual_seed(seed)
    names, digest = [], hashlib.sha256()
    stores = {name: Store(getattr(torch, name), 1 << 24) for name in ("float32", "bfloat16")}
    for shape in islice((each for each in shapes(seed, 4096, 16384) if not each.rank), count):
        one = torch.zeros(1, dtype=getattr(torch, shape.dtype))
        q, k, v = (one.clone().expand(size) for size in sizes(shape))
        names.append(prepare(q, k, v, mask=shape.rule, span=shape.span).name)
        if shape.batch * shape.heads * shape.queries * shape.keys * shape.head_dim <= SMALL:
            q, k, v = map(stores[shape.dtype], *zip(*sizes(shape), strict=True))
            out = attend(q, k, v, mask=shape.rule, span=shape.span)
            digest.update(out.float().numpy().tobytes())
    return {"names": names, "results": digest.hexdigest(), "threads": torch.get_num_threads()}


def sizes(shape: Shape) -> list[tuple[int, int, int, int]]:
    keys = shape.batch, shape.kv_heads, shape.keys, shape.head_dim
    return [(shape.batch, shape.heads, shape.queries, shape.head_dim), keys, keys]


@contextmanager
def beside(busy: int | None) -> Iterator[None]:
    """So many busy programs, or with None one that installs a package again and again."""
    with tempfile.TemporaryDirectory() as folder:
        if busy is None:
            run = f"subprocess.run([sys.executable, *{INSTALL}, {folder!r}])"
            commands = [f"import subprocess, sys\nwhile True: {run}"]
        else:
            commands = [SPIN] * busy
        running = [subprocess.Popen([sys.executable, "-c", each]) for each in commands]
        try:
            time.sleep(0.5)
            yield
        finally:
            for each in running:
                each.kill()
                each.wait()


def start(seed: int, calls: int, cache: Path) -> dict[str, Any]:
    """What a new process chooses."""
    command = [sys.executable, __file__, "--child", "--seed", str(seed), "--calls", str(calls)]
    environment = {**os.environ, "REGARD_CACHE": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--processes", type=int, default=4, help="beside each load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help="choose in this process")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if options.child:
        print(json.dumps(choices(options.seed, options.calls)))
        return
    found, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        for busy in (*BUSY, None):
            name = "pip install" if busy is None else f"{busy} busy programs"
            with beside(busy):
                some = [start(options.seed, options.calls, cache) for _ in range(options.processes)]
            found += some
            differ = max(sum(a != b for a, b in zip(each["names"], found[0]["names"], strict=True))
                         for each in some)  # fmt: skip
            bits = sum(each["results"] != found[0]["results"] for each in some)
            rows.append({"beside": name, "choices": differ, "results": bits})
            print(f"beside {name}: at most {differ} of {options.calls} choices differ from "
                  f"those of the first process, and results in {bits} of "
                  f"{len(some)}", flush=True)  # fmt: skip
        written = [each.name for each in cache.rglob("speed-*")]
    lists = {tuple(each["names"]) for each in found}
    print(f"{len(found)} processes, {THREADS} threads: {len(lists)} lists of choices; target 1")
    print(f"{len({each['results'] for each in found})} digests of results; target 1")
    print(f"files of rates written: {len(written)}; target 0")
    print("  " + ", ".join(f"{name} {n}" for name, n in Counter(found[0]["names"]).most_common()))
    finish("same_choice", [{"lists": len(lists), "written": written, "rows": rows}])


if __name__ == "__main__":
    main()
