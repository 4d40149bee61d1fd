"""The time of a decoding step that reads some pages, beside one that reads all, taken in turns.

    python benchmarks/selecting.py
    python benchmarks/selecting.py --tokens 65536 --pages 0.0625 --format K8V4

One layer's attention, without projections: `PagedCache` and `SelectingCache` over equal pages. The
keys are random, which changes no time. With `--threads 1` the clock is the process's own, which
other programs of a busy machine change little. The limit is the share of the pages.
"""

import argparse
import json
import statistics
import time

import torch

from regard import Causal, PagedCache, PagePool, SelectingCache, Span
from regard.ops.attend import prepare
from regard.turns import in_turns, ratio_of


def filled(cache, streams, chunk=4096):
    for some in zip(*(x.split(chunk, 2) for x in streams), strict=True):
        cache.update(*some)
    return cache


def stepper(cache, q, new):
    """A function that times one step."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def step():
        begun = clock()
        length = cache.length
        parts = cache.update(*new)
        span = Span(length, length + 1, 0, length + 1)
        prepared = prepare(q, new[0], new[1], mask=Causal(), span=span)
        if isinstance(cache, SelectingCache):
            cache.attend(prepared, q, parts, None)
        else:
            prepared.run(q, parts)
        return clock() - begun

    return step


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 65_536])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--pages", type=float, default=0.125)
    parser.add_argument("--format", default="plain")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=24)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = []
    for tokens in given.tokens:
        torch.manual_seed(0)
        shape = 1, given.kv_heads, tokens, given.head_dim
        streams = torch.randn(shape), torch.randn(shape)
        q = torch.randn(1, given.heads, 1, given.head_dim)
        new = tuple(x[:, :, :1].clone() for x in streams)
        runs = {}
        for name in ("full", "selected"):
            pool = PagePool(tokens // 64 + 8, page_size=64, format=given.format)
            cache = PagedCache(pool)
            cache = cache if name == "full" else SelectingCache(cache, given.pages)
            runs[name] = stepper(filled(cache, streams), q, new)
        del streams
        for run in runs.values():
            run(), run()
        times = in_turns(runs, given.rounds)
        ratio = ratio_of(times["selected"], times["full"])
        row = {name: statistics.median(x) * 1e3 for name, x in times.items()}
        row |= {"tokens": tokens, "ratio": ratio.value, "low": ratio.low, "high": ratio.high}
        found.append(row)
        full, selected = f"{row['full']:.2f} ms", f"{row['selected']:.2f} ms"
        print(f"{tokens:,} tokens: full {full}, selected {selected}, {ratio}")
    print(json.dumps({"pages": given.pages, "format": given.format, "rows": found}))


if __name__ == "__main__":
    main()
