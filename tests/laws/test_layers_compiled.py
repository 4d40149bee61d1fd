"""A compiled layer needs few graphs: one for each number of tokens, two for decoding.

In a Python of their own, as tests/laws/test_caches_compiled.py says.
"""

from pathlib import Path

import pytest

from interpreters import run_python

SUPPORT = Path(__file__).parents[1] / "support"
GRAPHS = """
import sys
import torch
from torch._dynamo.testing import CompileCounter
from layers import inputs, make
from regard import KVCache, StaticCache

torch.set_num_threads(1)

def graphs(name, use):
    torch.compiler.reset()
    counter, layer = CompileCounter(), make(name, torch.float32)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    with torch.set_grad_enabled(use == "training"):
        use_it(compiled, use)
    return counter.frame_count

def use_it(compiled, use):
    if use in ("lengths", "training"):
        for length in (5, 6, 7, 9, 12):
            compiled(inputs(2, length).float())
        return
    cache = StaticCache(40) if use == "static" else KVCache()
    compiled(inputs(2, 5).float(), cache=cache)
    for _ in range(8):
        compiled(inputs(2, 1).float(), cache=cache)

name, use, most = sys.argv[1:]
count = graphs(name, use)
assert count <= int(most), (name, use, count)
"""
MOST = {"lengths": 5, "training": 5, "static": 2, "growing": 2}
THIN = {("GQA", "lengths"), ("GQA", "growing")}
CASES = [
    pytest.param(name, use, marks=() if (name, use) in THIN else pytest.mark.long)
    for name in ("GQA", "everything", "MLA", "latent KV")
    for use in MOST
]


@pytest.mark.parametrize(("name", "use"), CASES)
def test_a_compiled_layer_needs_few_graphs(name, use):
    done = run_python("-c", GRAPHS, name, use, MOST[use], PYTHONPATH=str(SUPPORT))
    assert done.returncode == 0, done.stderr[-3000:]
