"""How much faster are two ranks than one process? Context, tensor and cache shards, side by side.

python benchmarks/distributed.py --docs

Two processes of one thread against one of them alone, in interleaved rounds. Targets: causal
prefill of 8,192 tokens with context parallel 1.7x, work balanced within 10 %, a window of 1,024
sends at most its share, decoding with a sharded cache of 65,536 tokens 1.6x. The limits of the same
run stand beside: the same work as two halves that send nothing, and the rate of gloo.
"""

import argparse
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import finish, machine
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import Work, points, show, side_by_side, start

from regard import Attention, Causal, KVCache, Rotary, SlidingWindow, Span, attend, prepare
from regard.cache import Cache
from regard.distributed import (
    ShardedCache,
    Shards,
    context_parallel,
    counted,
    sharded_caches,
    sum_gradients,
    tensor_parallel,
)
from regard.distributed.context.attending import attend_shards
from regard.distributed.ranks import Ranks
from regard.masks import Mask

DOCS = Path(__file__).parents[1] / "docs" / "distributed.json"
ALONE, BOTH = "one process", "two ranks"
HALVES = "two halves, nothing sent"  # what the machine gives to two processes
PREFILL, WINDOW, DECODE = 8192, 1024, 65536  # tokens; with --small a 64th of them
WIDTH, HEADS, KV_HEADS, HEAD_DIM = 1024, 16, 4, 64  # of the prefill
GQA_STEP, MLA_STEP = (32, 8, 128), (16, 1, 576)  # heads, key heads, width of keys: of decoding
LATENT = 512  # columns of MLA's one stream that are its values
PREFILL_TARGET, DECODE_TARGET, BALANCE = 1.7, 1.6, 0.1  # times as fast; of the mean

Row = dict[str, Any]
Works = dict[str, Work]


def gqa(dtype: torch.dtype, mask: Mask) -> Attention:
    sizes = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    return Attention(WIDTH, HEADS, **sizes, rope=Rotary(HEAD_DIM), mask=mask).to(dtype)


def attention(mesh: DeviceMesh, length: int, dtype: torch.dtype) -> Works:
    """Causal attention of projected heads."""
    q = torch.randn(1, HEADS, length, HEAD_DIM).to(dtype)
    k, v = torch.randn(2, 1, KV_HEADS, length, HEAD_DIM).to(dtype).unbind()
    ranks = Ranks(mesh)
    shards, mask = Shards(length, ranks.size), Causal()
    mine, k_mine, v_mine = (shards.take(x, ranks.rank, 2) for x in (q, k, v))
    half, k_half, v_half = (x[:, : x.shape[1] // 2] for x in (q, k, v))
    keys = {"ranks": ranks, "shards": shards, "mask": mask}
    return {
        ALONE: Work(lambda: attend(q, k, v, mask=mask), ranks=1),
        BOTH: Work(lambda: attend_shards(mine, (k_mine, v_mine), **keys)),
        f"{BOTH}, gather": Work(
            lambda: attend_shards(mine, (k_mine, v_mine), **keys, exchange="gather")
        ),
        HALVES: Work(lambda: attend(half, k_half, v_half, mask=mask)),
    }


def layer(mesh: DeviceMesh, length: int, dtype: torch.dtype) -> Works:
    """The forward of a causal layer."""
    whole = gqa(dtype, Causal())
    split = deepcopy(whole)
    plan = context_parallel(split, mesh)
    x = torch.randn(1, length, WIDTH).to(dtype)
    mine = plan.shard(x)
    return {ALONE: Work(lambda: whole(x), ranks=1), BOTH: Work(lambda: split(mine))}


def training(mesh: DeviceMesh, length: int, dtype: torch.dtype) -> Works:
    """Forward and backward of a causal layer, with the sum of its weights' gradients."""
    whole = gqa(dtype, Causal())
    split = deepcopy(whole)
    plan = context_parallel(split, mesh)
    x = torch.randn(1, length, WIDTH).to(dtype)
    mine, given = plan.shard(x).requires_grad_(), x.requires_grad_()

    def alone() -> None:
        with torch.enable_grad():
            whole(given).sum().backward()

    def both() -> None:
        with torch.enable_grad():
            split(mine).sum().backward()
        sum_gradients(split, mesh)

    return {ALONE: Work(alone, ranks=1), BOTH: Work(both)}


def tensor(mesh: DeviceMesh, length: int, dtype: torch.dtype) -> Works:
    """The forward of a causal layer, its heads split."""
    whole = gqa(dtype, Causal())
    split = tensor_parallel(deepcopy(whole), mesh)
    x = torch.randn(1, length, WIDTH).to(dtype)
    return {ALONE: Work(lambda: whole(x), ranks=1), BOTH: Work(lambda: split(x))}


def visible(mask: Mask, shards: Shards) -> list[int]:
    """The visible cells of each rank's queries."""
    return [
        sum(
            int(mask.dense(Span(start, stop, 0, shards.length)).sum())
            for start, stop in shards.pieces(rank)
        )
        for rank in range(shards.ranks)
    ]


def window(mesh: DeviceMesh, length: int, size: int) -> list[Row]:
    """What a forward sends under a window and under a causal mask alone, and each rank's work."""
    rows = []
    for mask in (Causal(), Causal() & SlidingWindow(size)):
        split = gqa(torch.float32, mask)
        plan = context_parallel(split, mesh)
        with counted() as sent:
            split(plan.shard(torch.randn(1, length, WIDTH)))
        every = [torch.tensor(0) for _ in range(mesh.size())]
        dist.all_gather(every, torch.tensor(sent.bytes))
        keys = 2 * KV_HEADS * HEAD_DIM * 4 * length  # bytes of all keys and values
        sizes = {"tokens": length, "dtype": "float32", "layout": plan.layout}
        row: Row = {"what": f"sent under {mask}", "ranks": mesh.size(), **sizes}
        row["bytes_sent"] = [x.item() for x in every]
        row["share_of_keys"] = sum(row["bytes_sent"]) / keys
        row["visible"] = visible(mask, plan.shards(length))
        rows.append(row)
    return rows


def show_sent(rows: list[Row], size: int) -> None:
    """Print the bytes and the work of both masks, on the first rank."""
    if dist.get_rank() > 0:
        return
    for row in rows:
        above = max(row["visible"]) * len(row["visible"]) / sum(row["visible"]) - 1
        mib = " ".join(f"{each / 2**20:.2f}" for each in row["bytes_sent"])
        told = f"{row['share_of_keys']:.1%} of all keys and values; the busiest rank has"
        print(f"{row['what']}, {row['layout']}: {mib} MiB a rank, {told} {above:.1%} more scores")
    share = size / rows[-1]["tokens"]
    print(f"targets: at most {share:.1%} under the window, {BALANCE:.0%} more scores")


def link(mesh: DeviceMesh, nbytes: int) -> list[Row]:
    """The latency of a short exchange, and the rate of a long one, both ways at once."""
    ranks = Ranks(mesh)
    other = 1 - ranks.rank

    def exchange(size: int, times: int) -> Work:
        here, there = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)

        def run() -> None:
            for _ in range(times):
                ranks.exchange({other: here}, {other: there}, "measure").wait()

        return Work(run)

    times = 100
    works = {"short": exchange(8, times), "long": exchange(nbytes, 4)}
    found = {
        row["what"]: row["seconds"] for row in points(side_by_side(works, 5, 5.0), works, "short")
    }
    rate = 4 * nbytes / found["long"]
    return [
        {"what": "latency of gloo", "ranks": 2, "seconds": found["short"] / times},
        {"what": "rate of gloo, each way", "ranks": 2, "bytes": nbytes, "bytes_a_second": rate},
    ]


def decoding(mesh: DeviceMesh, length: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> Works:
    """A step of attention with a cache of `length` tokens: keys and values, or MLA's latents."""
    heads, kv_heads, width = sizes
    streams = 2 if kv_heads > 1 else 1
    past = [torch.randn(1, kv_heads, length, width).to(dtype) for _ in range(streams)]
    half = [x[:, :, : length // 2] for x in past]
    q = torch.randn(1, heads, 1, width).to(dtype)

    def step(cache: Cache, past: list[Tensor]) -> Callable[[], object]:
        cache.update(*past)
        new = [x[:, :, :1] for x in past]
        values = new[1] if streams == 2 else new[0][..., :LATENT]
        sharded, held = isinstance(cache, ShardedCache), cache.length

        def run() -> None:
            call = prepare(q, new[0], values, mask=Causal(), span=cache.span(1), partial=sharded)
            parts = cache.update(*new)
            cache.attend(call, q, parts, None) if sharded else call.run(q, parts)
            cache.truncate(held)

        return run

    works = {BOTH: Work(step(ShardedCache(mesh), past)), HALVES: Work(step(KVCache(), half))}
    alone = step(KVCache(), past) if mesh.get_local_rank() == 0 else None
    return {ALONE: Work(alone, ranks=1)} | works


def layer_decoding(mesh: DeviceMesh, length: int, dtype: torch.dtype) -> Works:
    """A step of a layer of 32 heads on 8 of 128 (hidden size 2560): heads split, tokens split."""
    heads, kv_heads, head_dim = GQA_STEP
    sizes = {"num_kv_heads": kv_heads, "head_dim": head_dim, "rope": Rotary(head_dim)}
    whole = Attention(2560, heads, **sizes, mask=Causal()).to(dtype).eval()
    split = tensor_parallel(deepcopy(whole), mesh)
    x = torch.randn(1, 1, 2560).to(dtype)

    def step(layer: torch.nn.Module, cache: Cache) -> Callable[[], object]:
        past = torch.randn(1, kv_heads, length, head_dim).to(dtype)
        if layer is split:  # each rank gives its own key heads
            past = past[:, : kv_heads // mesh.size()]
        cache.update(past, past)

        def run() -> None:
            layer(x, cache=cache)
            cache.truncate(length)

        return run

    return {
        ALONE: Work(step(whole, KVCache()), ranks=1),
        "two ranks, heads split": Work(step(split, KVCache())),
        "two ranks, cache sharded": Work(step(whole, ShardedCache(mesh))),
        "two ranks, both": Work(step(split, sharded_caches(split, mesh)[""])),
    }


BOTH_TYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Case:
    """What is timed, at which size, and the target of a speed-up."""

    name: str
    make: Callable[..., Works]
    tokens: int
    dtypes: tuple[str, ...] = BOTH_TYPES
    target: float | None = None


CASES = (
    Case("prefill: causal attention", attention, PREFILL, target=PREFILL_TARGET),
    Case("prefill: causal layer", layer, PREFILL, target=PREFILL_TARGET),
    Case("training: causal layer", training, PREFILL, target=PREFILL_TARGET),
    Case("prefill: heads split", tensor, PREFILL, ("float32",)),
    Case(
        "decode: 32 heads on 8 of 128",
        partial(decoding, sizes=GQA_STEP),
        DECODE,
        target=DECODE_TARGET,
    ),
    Case("decode: MLA, 16 heads", partial(decoding, sizes=MLA_STEP), DECODE, target=DECODE_TARGET),
    Case("decode: layer", layer_decoding, DECODE // 4, ("float32",)),
)


def timed(case: Case, mesh: DeviceMesh, dtype: str, options: argparse.Namespace) -> list[Row]:
    """The rows of a case, printed."""
    length = case.tokens // options.shrink
    works = case.make(mesh, length, getattr(torch, dtype))
    samples = side_by_side(works, options.rounds, options.limit)
    shape = {"tokens": length, "dtype": dtype, "target": case.target}
    rows = [{"case": case.name, **row} for row in points(samples, works, ALONE, **shape)]
    show(f"{case.name}, {length:,} tokens, {dtype}", rows, case.target)
    return rows


def program(mesh: DeviceMesh, options: argparse.Namespace) -> None:
    """All cases, on each rank; the first prints, and writes the file."""
    torch.set_grad_enabled(False)
    rows = link(mesh, options.bytes)
    for case in CASES:
        if case.name.startswith(options.only):
            for dtype in case.dtypes:
                rows += timed(case, mesh, dtype, options)
    sizes = PREFILL // options.shrink, WINDOW // options.shrink
    sent = window(mesh, *sizes)
    show_sent(sent, sizes[1])
    rows += sent
    if dist.get_rank() > 0:
        return
    report = {"machine": machine(), "points": rows}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    finish("distributed", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=15.0, help="seconds of a case")
    parser.add_argument("--only", default="", help="cases that begin so, such as decode")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--docs", dest="json", action="store_const", const=DOCS, help=str(DOCS))
    parser.add_argument("--small", dest="shrink", action="store_const", const=64, default=1)
    parser.add_argument("--bytes", type=int, default=64 << 20, help="of a long message")
    start(program, parser.parse_args())


if __name__ == "__main__":
    main()
