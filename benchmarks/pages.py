"""What do pages cost a decode step, and what do shared prefixes and low bits save?

    python benchmarks/pages.py                 all cases
    python benchmarks/pages.py --only decode   cases whose name holds that
    python benchmarks/pages.py --docs          writes docs/pages.json

Pages have 64 tokens. Targets: a step over pages takes at most 1.1 of the time of one over a
contiguous cache at 16,384 tokens; a prefix of 8,192 tokens that is stored makes the time to the
first token 20 times shorter; 16 rows that share such a prefix decode 3 times as fast as 16 that do
not; a step from K8V8 takes at most 0.45 of the time of one from float32, one from K4V4 no more than
that; with queries of bfloat16, whose products with codes are of integers, K8V8 takes at most 0.75
of bfloat16, and K4V4 0.75 of K8V8; sealing a page takes under 5 % of the steps that it follows.

Steps are those of the attention: the new token is appended to the cache, and attends. Caches take
turns in copies that are together too large for the processor's. The limit is the time in which
this machine reads the keys and values once, measured in the same run.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    THREADS,
    Cold,
    card,
    finish,
    interleave,
    introduce,
    quartiles,
    read_bandwidth,
    summary,
)
from paged_caches import (
    CACHES,
    DYNAMIC,
    PAGE,
    SDPA,
    STATIC,
    TINY,
    Run,
    Sizes,
    Stored,
    cold,
    peers,
    step,
    tokens,
)  # fmt: skip
from results import keep
from torch import Tensor, nn

import regard.hf
from regard import (
    Attention,
    Cache,
    Causal,
    PagedCache,
    PagePool,
    Rotary,
    prepare,
)
from regard.cache import context_of
from regard.hf.packages import quiet

DOCS = Path(__file__).parent.parent / "docs"
DECODE_TARGETS = (  # contestant, base, at most
    ("pages in order", "contiguous", 1.1),
    ("pages scattered", "contiguous", 1.1),
    ("pages in order, bfloat16", "contiguous, bfloat16", 1.1),
    ("pages scattered, bfloat16", "contiguous, bfloat16", 1.1),
    ("K8V8, contiguous", "contiguous", 0.45),
    ("K8V8 pages", "contiguous", 0.45),
    ("K8V8, contiguous, bfloat16", "contiguous, bfloat16", 0.75),
    ("K8V8 pages, bfloat16", "contiguous, bfloat16", 0.75),
    ("K4V4, contiguous", "K8V8, contiguous", 1.0),
    ("K4V4 pages", "K8V8 pages", 1.0),
    ("K4V4, contiguous, bfloat16", "K8V8, contiguous, bfloat16", 0.75),
    ("K4V4 pages, bfloat16", "K8V8 pages, bfloat16", 0.75),
)

IN_PAGES: dict[str, Any] = {"tokens": 4096, "prefixes": False}
MODEL_CACHES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("contiguous", "growing", {}),
    ("pages", "paged", IN_PAGES),
    *((f"{name} pages", "paged", IN_PAGES | {"format": name}) for name in ("K8V8", "K4V4")),
)
MODEL_TARGETS = (
    ("pages", "contiguous", 1.1),
    ("K8V8 pages", "contiguous", 1.1),
    ("K4V4 pages", "contiguous", 1.1),
)


def judged(
    times: dict[str, list[float]], targets: tuple[tuple[str, str, float], ...]
) -> list[dict[str, Any]]:
    """Each target beside the median of ratios within rounds."""
    found = []
    for name, base, most in targets:
        ratio, low, high = quartiles(times[name], times[base])
        met = ratio <= most
        told = "met" if met else "MISSED"
        print(
            f"  {name} takes {ratio:.3f} of {base} [{low:.2f}, {high:.2f}], at most {most}: {told}"
        )
        found.append({"of": name, "to": base, "ratio": ratio, "most": most, "met": met})
    return found


def shown(name: str, times: dict[str, list[float]], base: str, nbytes: dict[str, int], read: float):
    """Rows of a case; beside each the share of the machine's read bandwidth that it uses."""
    rows = summary(times, base)
    card(name, rows, base)
    shares = {each: count / (rows[each]["ms"] / 1e3) / read for each, count in nbytes.items()}
    print("  of the limit: " + ", ".join(f"{each} {share:.0%}" for each, share in shares.items()))
    return {"case": name, "rows": rows, "of_limit": shares}


# ---- cases ----


def decode(sizes: Sizes, batch: int, read: float) -> dict[str, Any]:
    """A step at `keys` tokens, by every cache."""
    names = [n for n, each in CACHES.items() if batch == 1 or each.format == "plain"]
    keys, runs, nbytes = sizes.keys, {}, {}
    for name in names:
        stored = CACHES[name]
        caches = cold(sizes, stored, batch, keys)
        runs[name] = step(sizes, caches, batch, stored.dtype)
        nbytes[name] = sizes.nbytes(keys, batch, stored.bits)
        if stored.paged:
            print(f"  {name}: {reading_of(sizes, caches(), batch, stored.dtype)}")
    runs |= peers(sizes, batch)
    nbytes |= dict.fromkeys((SDPA, DYNAMIC, STATIC), nbytes["contiguous"])
    times = interleave(runs, rounds=sizes.rounds)
    found = shown(f"decode, {keys:,} keys, batch {batch}", times, "contiguous", nbytes, read)
    targets = tuple(each for each in DECODE_TARGETS if each[0] in times and each[1] in times)
    return {**found, "targets": judged(times, targets)}


def reading_of(sizes: Sizes, cache: Cache, batch: int, dtype: torch.dtype) -> str:
    """The backend of a step, and how many parts it reads."""
    q = torch.randn(batch, sizes.heads, 1, sizes.head_dim).to(dtype)
    k, v = tokens(sizes, batch, 1, dtype)
    parts = cache.peek(k, v)
    call = prepare(q, k, v, mask=Causal(), span=cache.span(1)).over(parts)
    return f"{len(parts)} parts, {call.name}"


def layer(sizes: Sizes, read: float) -> dict[str, Any]:
    """A step of a whole layer."""
    hidden = sizes.heads * sizes.head_dim
    module = attention(sizes, hidden)
    x = torch.randn(1, 1, hidden)
    runs, nbytes = {}, {}
    weights = 4 * sum(each.numel() for each in module.parameters())
    for name in ("contiguous", "pages scattered", "K8V8 pages"):
        caches = cold(sizes, CACHES[name], 1, sizes.keys)
        runs[name] = lambda caches=caches: module(x, cache=caches())
        nbytes[name] = weights + sizes.nbytes(sizes.keys, 1, CACHES[name].bits)
    times = interleave(runs, rounds=sizes.rounds)
    found = shown(f"layer, {sizes.keys:,} keys", times, "contiguous", nbytes, read)
    return {**found, "targets": judged(times, DECODE_TARGETS[1:2])}


def model(sizes: Sizes, read: float) -> dict[str, Any]:
    """A step of SmolLM2-135M with regard installed, over 1,024 tokens, or as many as there are."""
    path, keys = regard.hf.fetch_smollm2(), min(sizes.keys, 1024)
    with quiet():
        loaded, _ = regard.hf.load(path)
    regard.hf.install(loaded)
    ids = torch.randint(1000, (1, keys))
    runs = {}
    for name, kind, options in MODEL_CACHES:
        cache = regard.hf.cache(loaded, kind, **options)
        loaded(ids, past_key_values=cache, logits_to_keep=1)
        runs[name] = partial(loaded, ids[:, :1], past_key_values=cache)
    times = interleave(runs, rounds=2 * sizes.rounds)
    rows, name = summary(times, "contiguous"), f"step of SmolLM2-135M, {keys:,} keys"
    card(name, rows, "contiguous")
    return {"case": name, "rows": rows, "targets": judged(times, MODEL_TARGETS)}


def attention(sizes: Sizes, hidden: int) -> Attention:
    return Attention(
        hidden,
        sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        rope=Rotary(sizes.head_dim),
        mask=Causal(),
    ).eval()


def prefix(sizes: Sizes, read: float) -> dict[str, Any]:
    """The time to the first token of a text whose first part is stored, and of one that is not.

    It has the look-up and a fork of the pages in it; storing is timed beside it.
    """
    hidden, new = sizes.heads * sizes.head_dim // 4, PAGE
    small = sizes._replace(heads=sizes.heads // 4, kv_heads=max(1, sizes.kv_heads // 4))
    layers = [attention(small, hidden) for _ in range(sizes.layers)]
    context = context_of(nn.ModuleList(layers))
    text = torch.randint(50_000, (sizes.prefix + new,))
    embedded = torch.randn(1, len(text), hidden)
    pool = PagePool(4 * sizes.layers * (len(text) // PAGE + 2), PAGE)

    def run(caches: list[PagedCache], x: Tensor) -> Tensor:
        for module, cache in zip(layers, caches, strict=True):
            x = x + module(x, cache=cache)
        return x[:, -1]

    def cold_start() -> Tensor:
        return run([PagedCache(pool) for _ in layers], embedded)

    def hit() -> Tensor:
        found = pool.prefix(text, context=context)
        assert found.length == sizes.prefix
        return run(found.caches(), embedded[:, found.length :])

    stored = [PagedCache(pool) for _ in layers]
    run(stored, embedded[:, : sizes.prefix])
    begun = time.perf_counter()
    pool.store(text[: sizes.prefix], stored, context=context)
    storing = time.perf_counter() - begun
    difference = float((cold_start() - hit()).abs().max())
    assert difference < 1e-3, difference
    times = interleave({"not stored": cold_start, "stored": hit}, rounds=min(5, sizes.rounds))
    rows = summary(times, "not stored")
    name = f"prefix of {sizes.prefix:,} tokens and {new} more, {sizes.layers} layers of {hidden}"
    card(name, rows, "not stored")
    print(f"  storing it takes {1e3 * storing:.1f} ms")
    targets = judged(times, (("stored", "not stored", 1 / 20),))
    return {"case": name, "rows": rows, "storing_ms": 1e3 * storing, "targets": targets}


def shared(sizes: Sizes, read: float, format: str = "plain") -> dict[str, Any]:
    """A step of many rows that share a prefix, and of as many that have one each."""
    rows, keys = sizes.rows, sizes.prefix
    bits = 32.0 if format == "plain" else CACHES[f"{format} pages"].bits
    own = cold(sizes, Stored(bits, format), rows, keys)

    def sharing() -> PagedCache:
        pool = PagePool(2 * (keys // PAGE + 4 * rows), PAGE, format=format)
        cache = PagedCache(pool)
        cache.update(*tokens(sizes, 1, keys, torch.float32))
        cache.reorder(torch.zeros(rows, dtype=torch.int64))
        cache.update(*tokens(sizes, rows, 5, torch.float32))  # each row goes on by itself
        return cache

    one = Cold(sharing, sizes.nbytes(keys, 1, bits), sizes.cold)
    runs = {
        "a prefix each": step(sizes, own, rows, torch.float32),
        "shared prefix": step(sizes, one, rows, torch.float32),
    }
    each, once = sizes.nbytes(keys, rows, bits), sizes.nbytes(keys, 1, bits)
    times = interleave(runs, rounds=sizes.rounds)
    name = f"{rows} rows share a prefix of {keys:,} tokens, {format}"
    nbytes = {"a prefix each": each, "shared prefix": once}
    found = shown(name, times, "a prefix each", nbytes, read)
    return {**found, "targets": judged(times, (("shared prefix", "a prefix each", 1 / 3),))}


def sealing(sizes: Sizes, keys: int, format: str, batch: int) -> dict[str, Any]:
    """Steps that fill a page against the steps between them."""
    stored = CACHES[f"{format} pages"]
    caches = cold(sizes, stored, batch, keys)
    cache = caches()
    run = step(sizes, lambda: cache, batch, stored.dtype)
    run()
    between, sealing = [], []
    for _ in range(PAGE * max(2, sizes.rounds // 2)):
        begun = time.perf_counter()
        run()
        seconds = time.perf_counter() - begun
        (between if cache.length % PAGE else sealing).append(seconds)
    least, most = statistics.median(between), statistics.median(sealing)
    share = (most - least) / (PAGE * least)
    name = f"sealing a page of {format}, {keys:,} keys, batch {batch}"
    met = share < 0.05
    print(
        f"\n{name}\n  a step takes {1e3 * least:.3f} ms, one that seals {1e3 * most:.3f} ms: "
        f"{share:.1%} of the {PAGE} steps; under 5 %: {'met' if met else 'MISSED'}"
    )
    target = {"of": "sealing", "to": "steps", "ratio": share, "most": 0.05, "met": met}
    rows = {"step": {"ms": 1e3 * least}, "step that seals": {"ms": 1e3 * most}}
    return {"case": name, "rows": rows, "targets": [target]}


def cases(sizes: Sizes, read: float) -> dict[str, Run]:
    found: dict[str, Run] = {
        "decode, batch 1": lambda: decode(sizes, 1, read),
        "decode, batch 4": lambda: decode(sizes, 4, read),
        "layer": lambda: layer(sizes, read),
        "model": lambda: model(sizes, read),
        "shared prefix": lambda: shared(sizes, read),
        "shared prefix, K8V8": lambda: shared(sizes, read, "K8V8"),
    }
    short = min(sizes.keys, 1024)
    for format in ("K8V8", "K4V4"):
        for keys, batch in ((short, 1), (sizes.keys, 1), (short, 4)):
            name = f"sealing {format}, {keys}, batch {batch}"
            found[name] = partial(sealing, sizes, keys, format, batch)
    return {**found, "stored prefix": lambda: prefix(sizes, read)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="of the names of cases")
    parser.add_argument("--rounds", type=int, help="of each contestant, at most")
    parser.add_argument("--keys", type=int, help="in the caches of steps")
    parser.add_argument("--tiny", action="store_true", help="sizes that say nothing, to test this")
    parser.add_argument("--docs", action="store_true", help="write docs/pages.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    sizes = TINY if options.tiny else Sizes()
    sizes = sizes._replace(rounds=options.rounds or sizes.rounds, keys=options.keys or sizes.keys)
    introduce("numba", "transformers")
    read = read_bandwidth(8 if options.tiny else 512)
    print(f"{THREADS} threads, {read / 1e9:.1f} GB/s read")
    print("without transformers' QuantizedCache, which needs optimum-quanto or hqq")
    results = [run() for name, run in cases(sizes, read).items() if options.only in name]
    each = [target for result in results for target in result["targets"]]
    print(f"\ntargets: {sum(t['met'] for t in each)} met of {len(each)}")
    if options.docs:
        from common import machine

        whole = {"benchmark": "pages", "machine": machine(), "read": read, "results": results}
        keep(DOCS / "pages.json", whole)
    finish("pages", results)


if __name__ == "__main__":
    main()
