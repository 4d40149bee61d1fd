"""Two ranks of one thread, side by side with one of them alone: what each case runs in.

Both processes live as long as the program. Where one works alone, the other waits for a message
and uses no processor. Every round runs each variant once, as `interleave` does.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import quartiles
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from regard.distributed import counted

RANKS = 2
PATIENCE = timedelta(seconds=300)  # of a rank for the other: longer than any sample
LEAST_ROUNDS = 3  # for a median and quartiles


@dataclass(frozen=True)
class Work:
    """What is timed: on both ranks, or on the first alone."""

    run: Callable[[], Any]
    ranks: int = RANKS


@dataclass(frozen=True)
class Sample:
    """One run: its seconds, the longest of both ranks', and what each rank did."""

    seconds: float
    busy: tuple[float, ...]  # seconds of processor time of each rank's thread
    sent: tuple[int, ...]  # bytes of each rank


def start(program: Callable[[DeviceMesh, Any], None], options: Any) -> None:
    """Run a program in two ranks, and return when both have ended."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        torch.multiprocessing.spawn(_rank, (store, program, options), nprocs=RANKS)


def _rank(rank: int, store: str, program: Callable[[DeviceMesh, Any], None], options: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=RANKS, timeout=PATIENCE
    )
    program(init_device_mesh("cpu", (RANKS,)), options)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive the group, and may abort while the interpreter ends


def once(work: Work) -> Sample:
    """Run it, on both ranks or while the other waits."""
    dist.barrier()
    with counted() as sent:
        began, busy = time.perf_counter(), time.thread_time()
        if dist.get_rank() < work.ranks:
            work.run()
        seconds, busy = time.perf_counter() - began, time.thread_time() - busy
    here = torch.tensor([seconds, busy, sent.bytes], dtype=torch.float64)
    every = [torch.empty_like(here) for _ in range(RANKS)]
    dist.all_gather(every, here)
    took, spent, bytes_sent = torch.stack(every)[: work.ranks].T.tolist()
    return Sample(max(took), tuple(spent), tuple(map(int, bytes_sent)))


def side_by_side(works: dict[str, Work], rounds: int, limit: float) -> dict[str, list[Sample]]:
    """Samples by round, after a round that is not counted. After `limit` seconds of work no further
    round begins, once there are three."""
    samples: dict[str, list[Sample]] = {name: [] for name in works}
    for work in works.values():
        once(work)
    for turn in range(rounds):
        spent = sum(each.seconds for all_of_one in samples.values() for each in all_of_one)
        if turn >= LEAST_ROUNDS and spent > limit:  # the same sum on both ranks
            break
        for name in list(works) if turn % 2 == 0 else list(works)[::-1]:
            samples[name].append(once(works[name]))
    return samples


def points(
    samples: dict[str, list[Sample]], works: dict[str, Work], base: str, **shape: Any
) -> Iterator[dict[str, Any]]:
    """A row of JSON for each variant: medians over rounds, and the speed-up over `base`."""
    alone = [each.seconds for each in samples[base]]
    for name, runs in samples.items():
        ratio, low, high = quartiles(alone, [each.seconds for each in runs])
        busy = [
            statistics.median(spent) for spent in zip(*(each.busy for each in runs), strict=True)
        ]
        yield {
            "what": name,
            "ranks": works[name].ranks,
            **shape,
            "seconds": statistics.median(each.seconds for each in runs),
            "busy": busy,
            "imbalance": max(busy) * len(busy) / sum(busy) - 1,
            "bytes_sent": list(runs[-1].sent),
            "speedup": ratio,
            "speedup_low": low,
            "speedup_high": high,
            "rounds": len(runs),
        }


def show(title: str, rows: list[dict[str, Any]], target: float | None) -> None:
    """Print a table, on the first rank."""
    if dist.get_rank() > 0:
        return
    print(f"\n{title}" + (f"; target {target}x" if target else ""))
    print(f"  {'':<46}{'ms':>9}{'speed-up':>10}   quartiles      busy ms a rank   MiB sent")
    for row in rows:
        spread = f"[{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
        busy = " ".join(f"{1e3 * each:8.1f}" for each in row["busy"])
        sent = " ".join(f"{each / 2**20:.2f}" for each in row["bytes_sent"])
        head = f"  {row['what']:<46}{1e3 * row['seconds']:>9.1f}{row['speedup']:>10.2f}"
        print(f"{head}   {spread}  {busy:<17} {sent}", flush=True)
