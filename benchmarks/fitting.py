"""Fit the constants of a class of processors to times that `choosing.py --dump` wrote.

    python benchmarks/choosing.py --dump rows.jsonl
    python benchmarks/fitting.py rows.jsonl --threads 2        prints a `Speed` of one thread
    python benchmarks/fitting.py rows.jsonl --judge             what the present constants choose
    python benchmarks/fitting.py docs/benchmarks-amx.json --start AMX   to cases of the suite

A rate changes as long as the backends that the estimates choose become faster, or the estimates
come closer to the times. Calls under 0.1 ms count a fifth.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import torch
from choosing import Shape

import regard.rates as speed_module
from regard import prepare
from regard.ops.backends import BACKENDS
from regard.ops.call import Call
from regard.rates import SPEED, Speed, typical

LEAST = 1e-4  # seconds: backends of shorter calls are microseconds apart
NEAR, MOST = 1.15, 1.5  # times the fastest
STEPS = (1.5, 1.2, 1.08, 1.03)  # by which a rate is multiplied or divided in turn
CLOSENESS = 0.15  # weight of an estimate that is e times too high or too low
STAYING = 0.01  # weight of a rate that is e times that at which the search begins
SHAPE = Shape.__dataclass_fields__.keys()

Timed = tuple[Shape, Call, dict[str, float]]  # a call, and the seconds of each backend


RAN = {  # the backend of the suite's contestants; torch's mask of a window is made before
    "decode": {"regard": "fused", "sdpa": "sdpa", "sdpa, packed queries": "grouped"},
    "prefill": {"regard": "tiled", "sdpa": "sdpa"},
    "mask window": {"regard": "tiled"},
}


def read_cases(path: Path) -> list[Timed]:
    """Decoding and prefill of the suite."""
    found = []
    for case in json.loads(path.read_text())["results"]:
        kind = next((kind for kind in RAN if case["case"].startswith(f"{kind} ")), None)
        if kind is None or "fast" in case["case"]:
            continue
        window = 1024 if kind == "mask window" else 0
        sizes = (case[name] for name in ("batch", "heads", "kv_heads", "head_dim"))
        queries = case["queries"] or case["keys"]
        mask = "window" if window else "causal"
        shape = Shape(*sizes, queries, case["keys"], case["dtype"], mask, window)
        ran = RAN[kind]
        if queries > 1 and shape.dtype == "float32":
            ran = {"regard": "blocked"} if window else {"sdpa": "sdpa"}
        seconds = {ran[name]: row["ms"] / 1e3 for name, row in case["rows"].items() if name in ran}
        found.append((shape, called(shape), seconds))
    return found


def read(paths: list[Path]) -> list[Timed]:
    """The shapes that other programs did not disturb, each with its times; no latent ones."""
    times: dict[Shape, dict[str, float]] = defaultdict(dict)
    for path in paths:
        for row in map(json.loads, path.read_text().splitlines()):
            shape = Shape(**{name: row[name] for name in SHAPE})
            if not shape.rank and not row.get("disturbed"):
                times[shape][row["backend"]] = row["seconds"]
    return [(shape, called(shape), seconds) for shape, seconds in times.items()]


def called(shape: Shape) -> Call:
    """The description of a call of this shape, without memory for its keys."""
    one = torch.empty(1, dtype=getattr(torch, shape.dtype))
    q = one.expand(shape.batch, shape.heads, shape.queries, shape.head_dim)
    k = one.expand(shape.batch, shape.kv_heads, shape.keys, shape.head_dim)
    return prepare(q, k, one.clone().expand(k.shape), mask=shape.rule, span=shape.span).call


def estimates(each: Timed) -> dict[str, float]:
    return {name: BACKENDS[name].estimate(each[1]) for name in each[2]}


def slower(each: Timed) -> float:
    """The time of the backend with the lowest estimate, in times of the fastest."""
    expected = estimates(each)
    return each[2][min(expected, key=expected.__getitem__)] / min(each[2].values())


def moved(speed: Speed, start: Speed) -> float:
    """How far the rates are from those at which the search began: what no time tells stays."""
    pairs = zip(asdict(speed).values(), asdict(start).values(), strict=True)
    return STAYING * statistics.fmean(math.log(now / then) ** 2 for now, then in pairs)


def loss(timed: list[Timed], speed: Speed) -> float:
    """How far these rates are from choosing the fastest, and from the times."""
    SPEED.use(speed)
    total = 0.0
    for each in timed:
        expected, seconds = estimates(each), each[2]
        best = min(seconds.values())
        weight = 1.0 if best > LEAST else 0.2
        chosen = min(expected, key=expected.__getitem__)
        regret = min(1.5, math.log(seconds[chosen] / best))
        regret += 0.3 * (seconds[chosen] > NEAR * best) + 1.0 * (seconds[chosen] > MOST * best)
        near = [name for name in seconds if seconds[name] < 4 * best]
        off = statistics.fmean(min(1.0, abs(math.log(expected[n] / seconds[n]))) for n in near)
        total += weight * (regret + CLOSENESS * off * (best > 3 * LEAST))
    return total / len(timed)


def fit(timed: list[Timed], speed: Speed, threads: int) -> Speed:
    """The rates of one thread, from those at which the search begins."""
    start, least = speed, loss(timed, speed.of_threads(threads))
    for step in STEPS:
        better = True
        while better:
            better = False
            for name, rate in asdict(speed).items():
                for factor in (step, 1 / step):
                    tried = replace(speed, **{name: rate * factor})
                    found = loss(timed, tried.of_threads(threads)) + moved(tried, start)
                    if found < least - 1e-5:
                        speed, least, better = tried, found, True
                        break
        print(f"steps of {step}: {least:.4f}", flush=True)
    return speed


def judge(timed: list[Timed], speed: Speed, worst: int) -> None:
    """Print how good the choices are, and how far the estimates of each backend are off."""
    SPEED.use(speed)
    long = [each for each in timed if min(each[2].values()) > LEAST]
    for what, some in (("all", timed), ("over 0.1 ms", long)):
        times = [slower(each) for each in some]
        near = sum(each <= NEAR for each in times) / max(1, len(times))
        most = sum(each > MOST for each in times)
        print(f"{what}: {near:.1%} of {len(times)} within {NEAR}x; {most} above {MOST}x")
    off = defaultdict(list)
    for each in long:
        for name, expected in estimates(each).items():
            off[name, each[0].kind, each[0].dtype].append(math.log(expected / each[2][name]))
    for key, logs in sorted(off.items()):
        low, middle, high = statistics.quantiles(logs, n=4) if len(logs) > 1 else logs * 3
        spread = " ".join(f"{math.exp(x):.2f}" for x in (low, middle, high))
        print(f"  {' '.join(key):<32} {len(logs):>4}   estimate over time {spread}")
    for each in sorted(long, key=slower, reverse=True)[:worst]:
        shape, expected = each[0], estimates(each)
        heads = f"{shape.batch}x {shape.heads}/{shape.kv_heads}x{shape.head_dim}"
        mask = f"{shape.mask} {shape.window or ''}".strip()
        took = (f"{n} {1e3 * t:.3g} ({1e3 * expected[n]:.3g})" for n, t in each[2].items())
        print(
            f"  {slower(each):5.2f}x {heads}, {shape.queries} x {shape.keys}, {shape.dtype}, "
            f"{mask}: {', '.join(took)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, nargs="+", help="JSON lines of choosing.py --dump")
    parser.add_argument("--threads", type=int, default=2, help="that the times were taken with")
    parser.add_argument("--start", help="a class of processors; this machine's if none is given")
    parser.add_argument("--judge", action="store_true", help="fit nothing")
    parser.add_argument("--worst", type=int, default=20, help="misses to show")
    options = parser.parse_args()
    cases = [path for path in options.rows if path.suffix == ".json"]
    timed = read([path for path in options.rows if path not in cases])
    timed += [each for path in cases for each in read_cases(path)]
    speed = getattr(speed_module, options.start) if options.start else typical(1)
    if not options.judge:
        speed = fit(timed, speed, options.threads)
        print("Speed(" + ", ".join(f"{n}={r:.3g}" for n, r in asdict(speed).items()) + ")")
    judge(timed, speed.of_threads(options.threads), options.worst)


if __name__ == "__main__":
    main()
