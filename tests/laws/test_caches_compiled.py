"""Decoding with a cache takes two graphs, whatever its length; and errors as users get them.

In a Python of their own: the suite's type checks cannot be traced, and speak before our errors do.
"""

from pathlib import Path

from interpreters import run_python
from session import LONG

SOURCES = Path(__file__).parents[2] / "src"
DECODE = """
import sys
import torch
from torch._dynamo.testing import CompileCounter
from regard import KVCache, QuantizedCache, SlidingCache, StaticCache

def step(cache, new):
    span = cache.span(new.shape[2])
    (part,) = cache.update(new, new)
    return part.streams[0].sum() + 2 * part.streams[1].sum() + span.kv_start

def graphs(make, ragged):
    torch.compiler.reset()
    counter, caches = CompileCounter(), (make(), make())
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for cache in caches:
        cache.update(*[torch.ones(2, 1, 8, 4)] * 2)
        if ragged:
            cache.truncate(torch.tensor([3, 8]))
    for _ in range(64):
        new = torch.randn(2, 1, 1, 4)
        torch.testing.assert_close(compiled(caches[0], new), step(caches[1], new))
    assert caches[0].length == 72
    return counter.frame_count

torch.set_num_threads(1)
with torch.no_grad():
    makes = (lambda: StaticCache(80), KVCache, QuantizedCache)
    cases = [(make, ragged) for make in makes for ragged in (True, False)]
    for make, ragged in cases if sys.argv[1] == "every" else cases[::3] + cases[4:5]:
        count = graphs(make, ragged)
        assert count <= 2, (make(), ragged, count)
    count = graphs(lambda: SlidingCache(16), False)
    assert count <= 5, count
"""


def run(code, *arguments):
    done = run_python("-c", code, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]


def test_decoding_compiles_to_two_graphs():
    run(DECODE, "every" if LONG else "few")


def test_what_is_not_a_whole_number_is_refused():
    calls = [
        "StaticCache(2.5)",
        "SlidingCache(2.5)",
        "SlidingCache(2, rollback=0.5)",
        "QuantizedCache(8.0)",
        "KVCache().truncate(0.0)",
        "SlidingCache(2).truncate(None)",
    ]
    tries = [
        f"try: {call}\n"
        "except ValueError as error: assert 'whole number' in str(error), error\n"
        f"else: raise SystemExit({call!r})\n"
        for call in calls
    ]
    run("from regard import *\n" + "".join(tries))
