"""How near do calls on a GPU come to what it can do? regard, torch's kernels and FlexAttention.

python benchmarks/gpu.py                        # one GPU, under eight minutes
python benchmarks/gpu.py --device cpu --tiny    # runs the script itself, where there is no GPU

Each result is compared with float64 first, in some of its rows; one that is off by more than 1.5 u
max|V| (half precision) is reported and not timed. Times are medians of CUDA events around one call,
with the L2 cache emptied before each ("cold"): they include the time to start the operators where
that is longer. Decoding is timed once more in a CUDA graph, which starts them all at once. Shares
are of the rate of a long copy and of a bfloat16 product of 8,192 x 8,192 matrices, both measured in
the same run. Goals are what published kernels reach.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from common import finish
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard import (
    EVERYTHING,
    Causal,
    Documents,
    Mask,
    Padding,
    SlidingWindow,
    Span,
    attend,
    prepare,
)
from regard.devices import rates_of
from regard.ops.backends import BACKENDS
from regard.ops.choose import objection_of

FLUSH = 256 << 20  # bytes written before each cold call: more than any L2 cache
SCORES = 1 << 29  # the most scores of a call that is given to kernels that store them all
STORING = ("regard eager", "torch math")
COUNTED = 1024  # queries whose visible scores are counted at a time
SAMPLE_ROWS = 32  # queries of one head that are compared with float64
ROUNDS = {"cuda": 15, "cpu": 2}
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
GOALS = {  # of H200-class machines: the share of the copy or product rate, and its anchor
    "decode GQA, batch 32, 4,096 keys": (
        0.70,
        "TileLang 83 %",
    ),
    "decode MLA 16 heads": (0.60, "FlashMLA 90 %"),
    "decode MLA 128 heads": (0.20, "Triton 117 to 154 TFLOPS, FlashMLA 660"),
    "prefill causal": (0.50, "cuDNN 518 to 539, FlashAttention-3 579 to 616 TFLOPS on an H100"),
    "prefill window": (0.40, "FlexAttention on an H100: 85 % of FlashAttention-3"),
    "prefill documents": (0.40, "FlexAttention"),
}


@dataclass
class Case:
    """One call of attention: how to make its tensors, and what bounds it."""

    name: str
    q: tuple[int, int, int, int]
    k: tuple[int, int, int, int]
    v_dim: int = 0  # joined with the keys if it is not 0
    mask: Mask = field(default_factory=Causal)
    train: bool = False

    @property
    def decodes(self) -> bool:
        return self.q[2] == 1

    @property
    def span(self) -> Span:
        return Span(self.k[2] - self.q[2], self.k[2], 0, self.k[2])

    def tensors(self, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (torch.randn(*shape, device=device).to(dtype) for shape in (self.q, self.k))
        v = k[..., : self.v_dim] if self.v_dim else torch.randn_like(k)
        return (q, k, v) if not self.train else tuple(x.requires_grad_() for x in (q, k, v))

    def work(self, visible: float, dtype: torch.dtype) -> tuple[float, float]:
        """Bytes of keys and values (read once), and floating-point operations of visible scores."""
        batch, heads, queries, width = self.q
        values = self.v_dim or width
        stored = width if self.v_dim else width + values
        moved = batch * self.k[1] * self.k[2] * stored * dtype.itemsize
        operations = 2 * batch * heads * queries * self.k[2] * visible * (width + values)
        return moved, operations * (3.5 if self.train else 1)  # backward: 2.5 times the forward


def cases(tiny: bool) -> Iterator[Case]:
    """The calls, those with goals first."""
    if tiny:
        yield Case("decode GQA, batch 2, 64 keys", (2, 4, 1, 16), (2, 2, 64, 16))
        yield Case("decode MLA 4 heads", (1, 4, 1, 24), (1, 1, 64, 24), v_dim=16)
        yield Case("prefill window", (1, 4, 96, 16), (1, 2, 96, 16), mask=window(8))
        yield Case("prefill documents", (1, 4, 96, 16), (1, 2, 96, 16), mask=documents(96))
        yield Case("train causal", (1, 4, 48, 16), (1, 2, 48, 16), train=True)
        return
    for keys, batch in ((4096, 32), (1024, 1), (4096, 1), (16384, 1), (65536, 1), (1024, 8),
                        (16384, 8), (1024, 32), (16384, 32), (65536, 8)):  # fmt: skip
        name = f"decode GQA, batch {batch}, {keys:,} keys"
        yield Case(name, (batch, 32, 1, 128), (batch, 8, keys, 128))
    for heads, batch, keys in ((16, 32, 4096), (128, 32, 4096), (16, 1, 16384), (128, 1, 16384)):
        name = f"decode MLA {heads} heads, batch {batch}, {keys:,} keys"
        yield Case(name, (batch, heads, 1, 576), (batch, 1, keys, 576), v_dim=512)
    for length in (4096, 16384, 2048, 8192):
        yield square(f"prefill causal, {length:,}", length)
    yield square("prefill window of 1,024, 8,192", 8192, mask=window(1024))
    yield square("prefill documents of 1,000, 8,192", 8192, mask=documents(8192, 1000))
    real = Padding(torch.arange(4096)[None] >= torch.tensor([[0], [900], [2500], [37]]))
    yield square("prefill padding, 4,096", 4096, batch=4, mask=Causal() & real)
    for keys, some in ((16384, Causal()), (16384, window(4096))):
        name = f"chunk of 512 after {keys:,} keys" + (", window" if some != Causal() else "")
        yield Case(name, (1, 32, 512, 128), (1, 8, keys, 128), mask=some)
    yield square("train causal, 4,096", 4096, train=True)
    yield square("train documents of 1,000, 8,192", 8192, mask=documents(8192, 1000), train=True)
    yield square("train window of 1,024, 8,192", 8192, mask=window(1024), train=True)


def square(name: str, length: int, batch: int = 1, **options: Any) -> Case:
    return Case(name, (batch, 32, length, 128), (batch, 8, length, 128), **options)


def window(size: int) -> Mask:
    return Causal() & SlidingWindow(size)


def documents(length: int, size: int = 40) -> Mask:
    return Causal() & Documents(torch.arange(length) // size)


def share_of(case: Case, mask: Mask, device: str) -> float:
    """The share of scores that are visible, counted for some queries at a time."""
    span, counts = case.span, []
    for first in range(0, case.q[2], COUNTED):
        here = span.part(first, min(first + COUNTED, case.q[2]), span.kv_start, span.kv_stop)
        keep = mask.dense(here, batch=case.q[0], device=device)
        counts.append(keep.float().mean().item() * here.num_queries)
    return sum(counts) / case.q[2]


def on(device: str, mask: Mask) -> Mask:
    """The mask with its data on the device: a mask is made there once, not at every call."""
    parts = getattr(mask, "parts", (mask,))
    moved = EVERYTHING
    for part in parts:
        if isinstance(part, Documents):
            part = Documents(part.ids.to(device))
        elif isinstance(part, Padding):
            part = Padding(part.valid.to(device))
        moved = moved & part
    return moved


Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def variants(case: Case, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Run | str]:
    """Everything that can compute the call, or the sentence that says why it cannot."""
    given = {"mask": mask, "span": case.span, "scale": case.q[3] ** -0.5}
    made = prepare(q, k, v, **given)
    found: dict[str, Run | str] = {
        f"regard auto ({made.name})": lambda q, k, v: attend(q, k, v, **given)
    }
    for name in BACKENDS:
        objection = objection_of(made.call, name)
        found[f"regard {name}"] = objection or (
            lambda q, k, v, name=name: attend(q, k, v, **given, backend=name)
        )
    keep = (
        None
        if made.call.mask == EVERYTHING
        else mask.dense(case.span, batch=q.shape[0], device=q.device)
    )
    causal = isinstance(made.call.mask, Causal) and q.shape[2] == k.shape[2]
    for name, kernel in KERNELS.items():
        found[f"torch {name}"] = through(kernel, keep, causal, q.shape[1] != k.shape[1])
    found["torch flex"] = flex(case, mask, q, k)
    return found


def through(kernel: SDPBackend, keep: Tensor | None, causal: bool, grouped: bool) -> Run:
    """torch's scaled_dot_product_attention by one of its kernels, which raises if it cannot."""
    flags = {"is_causal": True} if causal else {"attn_mask": keep}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([kernel]):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **flags)

    return run


def flex(case: Case, mask: Mask, q: Tensor, k: Tensor) -> Run | str:
    """FlexAttention as its users call it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if q.device.type == "cpu":
        return "not compiled for a CPU here"
    past, sizes = case.span.q_start, (q.shape[0], None, q.shape[2], k.shape[2])
    # torch 2.11 asks an object for its truth, which a mask refuses
    rules = [part.__call__ for part in getattr(mask, "parts", (mask,))]
    function = lambda b, h, q_idx, kv_idx: reduce(  # noqa: E731
        torch.logical_and, [rule(b, h, q_idx + past, kv_idx) for rule in rules]
    )
    blocks = None if case.decodes else create_block_mask(function, *sizes, device=q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])


def error_of(case: Case, mask: Mask, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """The largest error of some rows, in units of u max|V|, against plain float64."""
    row, head = q.shape[0] - 1, q.shape[1] - 1
    last = slice(max(0, q.shape[2] - SAMPLE_ROWS), q.shape[2])
    span = Span(case.span.q_start + last.start, case.span.q_stop, 0, k.shape[2])
    keep = mask.dense(span, batch=q.shape[0], device=q.device)
    keep = keep if keep.dim() == 2 else keep[min(row, len(keep) - 1), 0]
    scores = q[row, head, last].double() @ k[row, -1].double().mT * q.shape[3] ** -0.5
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0)
    exact = weights @ v[row, -1].double()
    unit = torch.finfo(q.dtype).eps / 2 * v.double().abs().max()
    return float((out[row, head, last].double() - exact).abs().max() / unit)


class Clock:
    """Median seconds of a call, on a GPU by events with a cold L2 cache."""

    def __init__(self, device: str) -> None:
        self.device, self.rounds = device, ROUNDS[device]
        self.dirt = torch.empty(FLUSH if device == "cuda" else 1, dtype=torch.int8, device=device)

    def __call__(self, run: Callable[[], Any]) -> float:
        run()
        return statistics.median(self.once(run) for _ in range(self.rounds))

    def once(self, run: Callable[[], Any]) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        self.dirt.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3

    def graph(self, run: Callable[[], Any]) -> float:
        """The same, recorded in a CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return self(graph.replay)


def ceilings(clock: Clock, tiny: bool) -> dict[str, float]:
    """Bytes a second of a long copy (read and written), and operations of a large product."""
    device, dtype = clock.device, torch.bfloat16
    source = torch.zeros((1 << 16) if tiny else (1 << 30), dtype=torch.int8, device=device)
    target, size = torch.empty_like(source), 64 if tiny else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    copied, multiplied = clock(lambda: target.copy_(source)), clock(lambda: a @ b)
    return {"copy": 2 * source.numel() / copied, "products": 2 * size**3 / multiplied}


def measured(case: Case, run: Run, clock: Clock, mask: Mask, tensors: Any) -> dict[str, Any]:
    """The error and the times of one variant."""
    with nullcontext() if case.train else torch.no_grad():
        out = run(*tensors)
        plain = [each.detach() for each in (out, *tensors)]
        row: dict[str, Any] = {"error": error_of(case, mask, *plain)}
        if row["error"] > 1.5:
            return row
        step = (lambda: train(run, tensors)) if case.train else lambda: run(*tensors)
        row["ms"] = 1e3 * clock(step)
        if case.decodes and clock.device == "cuda":
            row["graph_ms"] = attempt(lambda: 1e3 * clock.graph(step))
    return row


def train(run: Run, tensors: tuple[Tensor, ...]) -> None:
    out = run(*tensors)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def attempt(work: Callable[[], Any]) -> Any:
    """What the work returns, or the first line of its error."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"


def measure(case: Case, clock: Clock, ceiling: dict[str, float]) -> dict[str, Any]:
    """All variants of a case, printed as a table."""
    dtype = torch.bfloat16
    with torch.no_grad():
        tensors = case.tensors(clock.device, dtype)
        mask = on(clock.device, case.mask)
        small = case.q[0] * case.q[1] * case.q[2] * case.k[2] <= SCORES
        visible = share_of(case, mask, clock.device)
    moved, operations = case.work(visible, dtype)
    bound = max(moved / ceiling["copy"], operations / ceiling["products"])
    goal = next((GOALS[name] for name in GOALS if case.name.startswith(name)), None)
    aim = f"goal {goal[0]:.0%} ({goal[1]})" if goal else "no goal"
    print(f"\n{case.name}: at least {1e3 * bound:.3f} ms by the measured ceilings; {aim}")
    rows: dict[str, Any] = {}
    for name, run in variants(case, mask, *tensors).items():
        if isinstance(run, str):
            rows[name] = {"objects": run}
        elif name in STORING and not small:
            rows[name] = {"objects": "it would store too many scores"}
        else:
            found = attempt(lambda run=run: measured(case, run, clock, mask, tensors))
            rows[name] = {"objects": found} if isinstance(found, str) else found
        show(name, rows[name], bound)
    return {"case": case.name, "bound_ms": 1e3 * bound, "goal": goal, "rows": rows}


def show(name: str, row: dict[str, Any], bound: float) -> None:
    if "objects" in row:
        return print(f"  {name:<28} {row['objects']}")
    if "ms" not in row:
        return print(f"  {name:<28} WRONG: off by {row['error']:.1f} u max|V|; not timed")
    graph = row.get("graph_ms")
    row["share"] = 1e3 * bound / min([row["ms"], *([graph] if isinstance(graph, float) else [])])
    told = f"graph {graph:.4f} ms" if isinstance(graph, float) else graph or ""
    print(f"  {name:<28} {row['ms']:9.4f} ms {row['share']:6.1%}  {row['error']:.2f} u  {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that test the script")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin no case after these")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="of the names of cases")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --device cpu --tiny runs the script without one")
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    warnings.simplefilter("ignore")
    begun, clock = time.perf_counter(), Clock(options.device)
    ceiling = ceilings(clock, options.tiny)
    sheet = rates_of(torch.device(options.device, 0))._asdict()
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(
        f"{device}: copies {ceiling['copy'] / 1e12:.3f} TB/s, bfloat16 products "
        f"{ceiling['products'] / 1e12:.1f} TFLOPS; by its data sheet {json.dumps(sheet)}"
    )
    results, left = [], []
    for case in cases(options.tiny):
        if time.perf_counter() - begun > 60 * options.minutes:
            left.append(case.name)
            continue
        if options.only not in case.name:
            continue
        results.append(measure(case, clock, ceiling))
    if left:
        print(f"\nleft out for lack of time: {', '.join(left)}")
    finish("gpu", [{"device": device, "ceilings": ceiling, "left_out": left, "cases": results}])


if __name__ == "__main__":
    main()
