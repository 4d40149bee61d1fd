"""Is the chosen backend the fastest? Random shapes, every backend that can run them, interleaved.

    python benchmarks/choosing.py
    python benchmarks/choosing.py --dump rows.jsonl     lines of times, for `fitting.py`
    ATEN_CPU_CAPABILITY=avx2 python benchmarks/choosing.py

Targets, of calls over 0.1 ms: 90 % within 1.15x of the fastest, 95 % after `regard tune`, and none
above 1.5x. Of latent shapes it asks the same about MLA's two forms. Counted are shapes that two or
more could run while no other program disturbed them. Left out is who is expected to take over half
a second and four times the fastest's time; a shape that still takes someone so long is skipped.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import THREADS, Store, finish, interleave, quartiles
from torch import Tensor

from regard import (
    Causal,
    Mask,
    MultiHeadLatentAttention,
    Part,
    Rotary,
    SlidingWindow,
    Span,
    attend,
    prepare,
)
from regard.bench.load import Watch
from regard.layers.attending import attended
from regard.layers.inputs import Arrival
from regard.layers.latent_forms import FORMS, choose_form
from regard.masks import EVERYTHING
from regard.ops.backends import BACKENDS
from regard.ops.choose import objection_of
from regard.rates import read_speed

NEAR, MOST = 1.15, 1.5  # times the fastest
LEAST = 1e-4  # seconds of the fastest: backends of shorter calls are microseconds apart
TARGET, TUNED_TARGET = 0.9, 0.95  # shares of longer calls
SLOW = 0.5  # seconds
BYTES = 1 << 30  # of keys and values
CELLS = 600_000_000  # scores, of which a backend may hold several copies
LATENT_EVERY = 8

Run = Callable[[], Tensor]
Times = dict[str, list[float]]  # seconds of each backend, by round


@dataclass(frozen=True)
class Shape:
    """A call; `rank` above 0 makes it a latent one, with a rotary key of half a head."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    keys: int
    dtype: str
    mask: str
    window: int = 0
    rank: int = 0

    @property
    def span(self) -> Span:
        return Span(self.keys - self.queries, self.keys, 0, self.keys)

    @property
    def rule(self) -> Mask:
        if self.mask == "none":
            return EVERYTHING
        return Causal() & SlidingWindow(self.window) if self.window else Causal()

    @property
    def kind(self) -> str:
        if self.rank:
            return "latent"
        few = self.queries * self.heads // self.kv_heads <= 256
        return "decode" if self.queries == 1 else "few queries" if few else "prefill"


@dataclass
class Contest:
    """The backends that can run a shape, the chosen one, and the estimate of each."""

    runs: dict[str, Run]
    chosen: str
    estimates: dict[str, float | None]


def shapes(seed: int, most_queries: int, most_keys: int) -> Iterator[Shape]:
    """Endless random shapes, the same for a seed; sizes are uniform on a logarithmic scale."""
    rng = random.Random(seed)

    def between(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    count = 0
    while True:
        count += 1
        latent = count % LATENT_EVERY == 0
        kv_heads = rng.choice([1, 2, 4, 8, 16, 32])
        heads = kv_heads * rng.choice([1, 1, 2, 3, 4, 8, 16])
        keys = between(1, most_keys)
        queries = 1 if rng.random() < 0.4 else between(1, min(most_queries, keys))
        mask = rng.choice(["none", "causal", "window"])
        shape = Shape(
            batch=rng.choice([1, 1, 1, 2, 4, 8]),
            heads=rng.choice([8, 16, 32]) if latent else heads,
            kv_heads=1 if latent else kv_heads,
            head_dim=128 if latent else rng.choice([32, 64, 64, 80, 96, 128, 128, 256]),
            queries=queries,
            keys=keys,
            dtype=rng.choice(["float32", "bfloat16"]),
            mask="causal" if latent else mask,
            window=between(1, keys) if mask == "window" and not latent else 0,
            rank=rng.choice([128, 256, 512]) if latent else 0,
        )
        if _fits(shape):
            yield shape


def _fits(shape: Shape) -> bool:
    heads = shape.heads if shape.rank else shape.kv_heads
    nbytes = 8 * shape.batch * heads * shape.keys * shape.head_dim
    cells = shape.batch * shape.heads * shape.queries * shape.keys
    return shape.heads <= 64 and nbytes <= BYTES and cells <= CELLS


def contest(shape: Shape, store: Store) -> Contest:
    """Every backend without an objection, by name; not `flex`, which is for GPUs."""
    size = (shape.batch, shape.kv_heads, shape.keys, shape.head_dim)
    q = store(shape.batch, shape.heads, shape.queries, shape.head_dim)
    options: dict[str, Any] = {"mask": shape.rule, "span": shape.span}
    prepared = prepare(q, store(*size), store(*size), **options)
    call = prepared.call
    able = [name for name in BACKENDS if name != "flex" and objection_of(call, name) is None]

    def through(name: str) -> Run:
        return lambda: attend(q, store(*size), store(*size), backend=name, **options)

    estimates = {name: BACKENDS[name].estimate(call) for name in able}
    quickest = min(estimates.values())
    runs = {
        name: through(name)
        for name in able
        if name == prepared.name or estimates[name] <= max(SLOW, 4 * quickest)
    }
    return Contest(runs, prepared.name, dict(estimates))


def latent_contest(shape: Shape, store: Store) -> Contest:
    """Both forms, from projected queries to outputs of each head."""
    rotary, dtype = shape.head_dim // 2, store.numbers.dtype
    layer = MultiHeadLatentAttention(
        256,
        shape.heads,
        kv_lora_rank=shape.rank,
        qk_nope_head_dim=shape.head_dim,
        qk_rope_head_dim=rotary,
        v_head_dim=shape.head_dim,
        rope=Rotary(rotary, pairing="pairs"),
        mask=Causal(),
    ).to(dtype)
    q_nope, q_rope = store(shape.batch, shape.heads, shape.queries, layer.qk_head_dim).split(
        [shape.head_dim, rotary], dim=-1
    )

    def through(name: str) -> Run:
        form = FORMS[name](layer, "asked for")

        def run() -> Tensor:
            joined = store(shape.batch, 1, shape.keys, shape.rank + rotary)
            q, at = form.queries(q_nope, q_rope), Arrival(layer.mask, shape.span, torch.empty(0))
            keys = form.keys((Part(0, shape.keys, (joined,)),), at)
            return form.output(attended(layer, q, keys, at))

        return run

    chosen = choose_form(layer, shape.span).name
    return Contest({name: through(name) for name in FORMS}, chosen, dict.fromkeys(FORMS))


def judge(shape: Shape, found: Contest, rounds: int, tries: int) -> dict[str, Any] | None:
    """Time of the choice over the fastest; None if too slow, if no other backend can, or if other
    programs disturbed it."""
    if len(found.runs) < 2:
        return None
    if any(_seconds(run) > SLOW and _seconds(run) > SLOW for run in found.runs.values()):
        return None  # twice: the first time, it may have been compiling
    times = _undisturbed(
        lambda: interleave(found.runs, rounds=rounds, sample=0.006, limit=2.0), tries
    )
    if times is None:
        return None
    seconds = {name: statistics.median(each) for name, each in times.items()}
    best = min(seconds, key=seconds.__getitem__)
    return {
        **asdict(shape),
        "kind": shape.kind,
        "chosen": found.chosen,
        "best": best,
        "slower": quartiles(times[found.chosen], times[best])[0],
        "seconds": seconds,
        "estimates": {name: found.estimates[name] for name in seconds},
    }


def _undisturbed(measure: Callable[[], Times], tries: int) -> Times | None:
    """Times that no other program disturbed; None if that fails so many times. With 0 tries they
    are taken once, whatever disturbs them."""
    if not tries:
        return measure()
    for _ in range(tries):
        watch = Watch()
        times = measure()
        if watch.load().objection(THREADS) is None:
            return times
    return None


def _seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def sweep(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure random shapes until there are enough, or the time is over."""
    total = options.cold << 20
    stores = {name: Store(getattr(torch, name), total) for name in ("float32", "bfloat16")}
    begun, judged = time.perf_counter(), []
    for shape in shapes(options.seed, options.queries, options.keys):
        if len(judged) >= options.shapes or time.perf_counter() - begun > options.seconds:
            break
        make = latent_contest if shape.rank else contest
        result = judge(shape, make(shape, stores[shape.dtype]), options.rounds, options.tries)
        if result is not None:
            judged.append(result)
            if len(judged) % 25 == 0:
                print(f"{len(judged)} shapes, {time.perf_counter() - begun:.0f} s", flush=True)
    return judged


def share(results: list[dict[str, Any]], most: float = NEAR) -> float:
    """The share of choices within so many times of the fastest."""
    return sum(each["slower"] <= most for each in results) / max(1, len(results))


def is_long(result: dict[str, Any]) -> bool:
    return min(result["seconds"].values()) >= LEAST


def report(judged: list[dict[str, Any]], worst: int) -> None:
    """Print shares by kind, dtype and mask, and the worst misses."""
    for key in ("kind", "dtype", "mask"):
        values = sorted({each[key] for each in judged})
        parts = {value: [each for each in judged if each[key] == value] for value in values}
        print("  " + ", ".join(f"{v} {share(p):.0%} of {len(p)}" for v, p in parts.items()))
    missed = sorted((e for e in judged if e["slower"] > NEAR), key=lambda e: -e["slower"])
    print("  the worst misses:")
    for each in missed[:worst]:
        heads = f"{each['batch']}x {each['heads']}/{each['kv_heads']}x{each['head_dim']}"
        latent = f" rank {each['rank']}" if each["rank"] else ""
        mask = f"{each['mask']} {each['window'] or ''}".strip()
        took = ", ".join(f"{name} {1e3 * s:.3g} ms" for name, s in each["seconds"].items())
        print(
            f"  {each['slower']:6.2f}x  {each['chosen']} for {each['best']}: {heads}{latent}, "
            f"{each['queries']} x {each['keys']}, {each['dtype']}, {mask} ({took})"
        )


def dump(judged: list[dict[str, Any]], path: Path) -> None:
    """One line for each shape and backend."""
    with path.open("w") as file:
        for each in judged:
            shape = {k: v for k, v in each.items() if k not in ("seconds", "estimates")}
            for name, seconds in each["seconds"].items():
                row = {"backend": name, "seconds": seconds, "estimate": each["estimates"][name]}
                file.write(json.dumps({**row, **shape}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=int, default=320)
    parser.add_argument("--seconds", type=float, default=900.0, help="for all of them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tries", type=int, default=3, help="0: count disturbed shapes, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--queries", type=int, default=4096, help="at most")
    parser.add_argument("--keys", type=int, default=16384, help="at most")
    parser.add_argument("--cold", type=int, default=256, help="MiB that keys are spread over")
    parser.add_argument("--worst", type=int, default=15, help="misses to show")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="JSON lines")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    judged = sweep(options)
    long = [each for each in judged if is_long(each)]
    target = TARGET if read_speed(THREADS) is None else TUNED_TARGET
    print(f"{THREADS} threads, {', '.join(BACKENDS)}; {len(judged)} shapes")
    print(f"{share(judged):.1%} within {NEAR}x of the fastest")
    over = sum(each["slower"] > MOST for each in long)
    print(f"{share(long):.1%} of {len(long)} over 0.1 ms; target {target:.0%}")
    print(f"{over} of these above {MOST}x; target 0")
    report(long, options.worst)
    if options.dump:
        dump(judged, options.dump)
    whole = {"share": share(long), "near": NEAR, "target": target, "shapes": len(long)}
    whole |= {"over": over, "share_of_all": share(judged)}
    finish("choosing", [{**whole, "missed": [e for e in long if e["slower"] > NEAR]}])


if __name__ == "__main__":
    main()
